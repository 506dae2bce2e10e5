"""Work that several processes share: how the others are started, heard and seen to end, and how tensors go between."""
