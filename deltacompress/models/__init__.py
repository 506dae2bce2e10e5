"""What transformers makes of a model directory that came from elsewhere, and the only way in.

transformers opens what it finds in a directory, and what the files there name: other weights, adapters, kernels, code.
So it is never given such a directory. A config passes `config`, a tokenizer `tokenizers`, generation settings
`generation`; weights are read by `checkpoint` and handed over by `load`. No other room calls a `from_pretrained`.
"""
