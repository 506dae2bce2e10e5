"""What the model sees while it is compressed: calibration tokens, and the layer-by-layer walk that feeds them."""
