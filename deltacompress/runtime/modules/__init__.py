"""The modules of a model that know variants: linears, norms, embedding, attention, and who is in the batch."""
