"""Quality gates: what a policy may ask, and a report held against it."""
