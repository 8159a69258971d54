"""Training data: the packaged corpus and text files as bytes, token files, and a resumable iterator of batches."""

from taco_jax.data.loader import Batches, batches, device_batch, evaluation_batches, open_data
from taco_jax.data.tokens import CORPORA, DataError, check_ids, open_tokens, read_text

__all__ = [
    "CORPORA",
    "Batches",
    "DataError",
    "batches",
    "check_ids",
    "device_batch",
    "evaluation_batches",
    "open_data",
    "open_tokens",
    "read_text",
]
