"""The engine's process: the runtime with its variants, and the threads that ask it and tell of it."""
