"""The column loops of the solver as compiled functions over blocks of rows, for CPUs."""
