"""Checkpoints on disk: strict headers, which files hold the weights, lazy reading, deterministic writing, pairing.

Nothing here knows what a delta is. Modules say in their first line whether they import torch: `header`, `names`,
`side_files`, `weight_files` and `hub` do not, so that the zoo may use them.
"""
