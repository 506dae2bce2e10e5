"""Files on disk, whoever put them there. No torch."""
