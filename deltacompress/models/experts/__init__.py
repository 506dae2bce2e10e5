"""Mixtures of experts: what a checkpoint holds of each expert, and the forward that runs them one by one."""
