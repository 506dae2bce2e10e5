"""How parts decode: what they must be (`spec`), and the tensor from them piece by piece (`pieces`)."""
