"""Architectures: the model types that transformers knows as causal language models, and which of them can be walked."""
