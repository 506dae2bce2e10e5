"""Many fine-tuned models of one base from one jobs file: all of it checked first, then one job after another."""
