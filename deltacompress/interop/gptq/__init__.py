"""GPTQ checkpoints, as AutoGPTQ defined them: out of an artifact of whole weights, and into a dense checkpoint."""
