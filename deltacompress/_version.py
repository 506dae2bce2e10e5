"""The version of this package, for whoever records it: importing this imports nothing else."""

__version__ = "0.1.0"
