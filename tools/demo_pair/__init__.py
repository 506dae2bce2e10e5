"""Makes the demo pair under registry/demo: a small base model and two full fine-tunes of it, trained from nothing.

`data` makes the text and the tasks, `tokenizer` the vocabulary, `train` the checkpoints. None of it is in the wheel.
"""
