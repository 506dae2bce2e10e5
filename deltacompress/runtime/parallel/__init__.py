"""One base with its variants on several devices, a process for each: tensor parallelism (docs/runtime.md)."""
