"""Pure functions on tensors: packing, grids, sparsity patterns, Hessians, the OBS solver. No I/O, no models."""
