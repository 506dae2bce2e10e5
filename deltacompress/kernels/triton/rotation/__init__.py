"""Rotations: the Triton kernel, and its way of one row."""
