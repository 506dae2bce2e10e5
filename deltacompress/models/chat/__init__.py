"""Chat templates: programs that came with a model, run in processes of their own, with limits of time and memory."""
