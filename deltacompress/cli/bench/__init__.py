"""The verbs of `deltacompress bench`: `verbs` has the parts of compressing and of kernels, and all others by name."""
