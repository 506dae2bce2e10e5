"""Which variants are on the device: a byte budget, least recently used out first."""
