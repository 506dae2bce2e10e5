"""One delta on disk: the manifest and what its fields owe each other, its parts, opening, verifying, restoring."""
