"""The demo pair: a small base model and two full fine-tunes of it, trained from nothing on text generated here.

`data` makes the text and the tasks, `tokenizer` the vocabulary, `train` the checkpoints under registry/demo, `score`
measures a checkpoint on a task. Import the modules you need: this file imports nothing, so that it costs nothing.
"""
