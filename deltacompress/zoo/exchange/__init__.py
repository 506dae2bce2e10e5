"""Out of a zoo and into another one: pull, names in the place of paths, export and import."""
