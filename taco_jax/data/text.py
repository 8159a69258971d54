"""Text as tokens: every byte of the UTF-8 text is one id below 256, so no tokenizer is needed.

The packaged corpus "austen" is the text of Jane Austen's six novels (public domain), 3,997,869 bytes. Byte n-grams
reach 2.39 (bigram) and 1.88 (trigram) nats per byte on it.
"""

from __future__ import annotations

import lzma
from importlib import resources
from pathlib import Path

import numpy as np

from taco_jax.data.tokens import DataError, require_file

CORPORA = {"austen": "quickstart_austen.txt.xz"}


def read_text(name: str) -> np.ndarray:
    """The bytes of a packaged corpus or of a `.txt` or `.txt.xz` file, uint8[n]. Raises DataError."""
    if name in CORPORA:
        data = (resources.files("taco_jax.data") / CORPORA[name]).read_bytes()
        return np.frombuffer(lzma.decompress(data), np.uint8)
    path = Path(name)
    require_file(path)
    data = path.read_bytes()
    if path.suffix == ".xz" and data:
        try:
            data = lzma.decompress(data)
        except lzma.LZMAError as error:
            raise DataError(f"{path}: corrupt xz file ({error})") from None
    if not data:
        raise DataError(f"{path}: the file is empty")
    return np.frombuffer(data, np.uint8)
