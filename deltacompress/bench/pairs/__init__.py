"""Compression of real pairs, measured by what is restored."""
