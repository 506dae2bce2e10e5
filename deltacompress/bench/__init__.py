"""Benchmarks that print the ratio to a baseline measured in the same run."""
