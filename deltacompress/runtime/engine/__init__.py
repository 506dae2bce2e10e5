"""From requests to tokens: checks, continuous batching, the KV cache, graphs."""
