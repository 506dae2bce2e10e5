"""The verbs of `deltacompress`, a file for each group, but for those of the folders beside."""
