"""Forwards of a model, layer by layer, for what its linears receive."""
