"""Training data: text as bytes, token files of several kinds, prepared folders, and a resumable iterator of batches."""

from taco_jax.data.loader import Batches, batches, device_batch, evaluation_batches
from taco_jax.data.prepared import Prepared, is_prepared, open_prepared
from taco_jax.data.sources import Mixture, open_data, open_source, prepared_folders
from taco_jax.data.token_files import open_token_file
from taco_jax.data.tokens import CORPORA, DataError, check_ids, open_tokens, read_text

__all__ = [
    "CORPORA",
    "Batches",
    "DataError",
    "Mixture",
    "Prepared",
    "batches",
    "check_ids",
    "device_batch",
    "evaluation_batches",
    "is_prepared",
    "open_data",
    "open_prepared",
    "open_source",
    "open_token_file",
    "open_tokens",
    "prepared_folders",
    "read_text",
]
