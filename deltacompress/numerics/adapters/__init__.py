"""What adapters ask for once, when they are loaded: rotations out of their parameters, norms of adapted weights."""
