"""One compression on several GPUs: a process for each, which share the calibration data and the rows of linears."""
