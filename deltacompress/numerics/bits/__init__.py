"""Codes and patterns as bytes: bits, rows of unequal length, and the symbols that an entropy coder codes well."""
