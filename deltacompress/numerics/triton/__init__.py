"""The column loops of the solver, a block of columns in one launch each, for GPUs."""
