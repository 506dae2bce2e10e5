"""One variant: an opened artifact held against its base, and what it brings for each tensor of the model."""
