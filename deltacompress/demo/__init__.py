"""`deltacompress demo`: the main job on the pair that ships with the project, and `score`, which measures a checkpoint.

tools/demo_pair makes the pair. Import the modules you need: this file imports nothing, so that it costs nothing.
"""
