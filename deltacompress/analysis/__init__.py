"""What a fine-tune changed, measured before any method touches it: statistics of a pair, as data and as a picture."""
