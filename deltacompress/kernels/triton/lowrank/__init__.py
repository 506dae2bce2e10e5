"""Low rank through Triton: in passes of its own, or in the launch of the base's product."""
