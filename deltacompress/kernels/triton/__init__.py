"""SBMM and the small operations of a decode step in Triton. Imported only when they are asked for."""
