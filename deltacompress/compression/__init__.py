"""From a pair of checkpoints to a published artifact. `driver` is the page to read first."""
