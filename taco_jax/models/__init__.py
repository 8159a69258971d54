"""Decoders that train with compressed tensor parallelism, and their Hugging Face tables.

`config` and `presets` describe a model, `decoder` is the model, `huggingface` converts weights.
"""
