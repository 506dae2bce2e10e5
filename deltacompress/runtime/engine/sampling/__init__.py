"""From logits to tokens, for all rows of a step at once, on the device."""
