"""Batches of token windows, in an order that depends on the seed alone, from any position on.

Letters: B sequences of a batch, L predicted tokens of a sequence; a window has L + 1 tokens, the last of which is only
predicted. Windows do not overlap in their predicted tokens.

The position of the iterator is one number, `samples`: the windows handed out since the start of the run. It depends on
neither the mesh, nor the processes, nor the batch size, so a run goes on with the next unseen window on any of them.
Every process makes the whole batch and gives its devices their rows: reading is cheap, and the order is everywhere
equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from taco_jax.config import DataConfig, TrainConfig
from taco_jax.data.tokens import CORPORA, DataError, check_ids, open_tokens, read_text
from taco_jax.errors import did_you_mean


def open_data(config: DataConfig, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(training ids, validation ids). Without a validation file the end of the training data is held out."""
    train = _open(config.train, vocab_size, config.token_dtype)
    if config.validation is not None:
        return train, _open(config.validation, vocab_size, config.token_dtype)
    cut = round(len(train) * (1 - config.validation_fraction))
    return train[:cut], train[cut:]


def _open(name: str, vocab_size: int, dtype: str) -> np.ndarray:
    if name.endswith(".bin"):
        return open_tokens(name, vocab_size, dtype)
    if name in CORPORA or name.endswith((".txt", ".txt.xz")):
        tokens = read_text(name)
        check_ids(tokens, vocab_size, name)
        return tokens
    if not Path(name).suffix and not Path(name).exists():
        raise DataError(f"data {name!r}: no such corpus; {did_you_mean(name, CORPORA)} (or the path of a file)")
    raise DataError(f"{name}: unknown kind of data file; use .txt, .txt.xz (read as bytes) or .bin (token ids)")


class Windows:
    """Random access to the windows int32[L + 1] of `tokens`; every window's ids are checked when it is read."""

    def __init__(self, tokens: np.ndarray, length: int, vocab_size: int, name: str):
        self.tokens, self.length, self.vocab_size, self.name = tokens, length, vocab_size, name
        if len(tokens) < length + 1:
            raise DataError(
                f"{name}: too short: {len(tokens)} tokens, one window needs data.sequence_length + 1 = "
                f"{length + 1}; use a longer file or a sequence_length of at most {max(len(tokens) - 1, 0)}"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self.length
        window = self.tokens[start : start + self.length + 1]
        check_ids(window, self.vocab_size, self.name, start)
        return window.astype(np.int32)

    def __repr__(self) -> str:
        return f"Windows({self.name}, {len(self)} of {self.length})"


class Batches(Iterator[np.ndarray]):
    """An endless iterator of int32[B, L + 1] over shuffled windows, one order per epoch, drawn from `seed`.

    `state()` is {"samples": windows handed out, "seed": seed, "windows": windows of one epoch}; `restore(state)` goes
    on after them, with any batch size. Another seed or other data would repeat and skip windows: both raise DataError.
    """

    def __init__(self, windows: Windows, batch: int, *, seed: int, prefetch: int = 2):
        self.windows, self.batch, self.seed, self.prefetch = windows, batch, seed, prefetch
        self._seek(0)

    def _seek(self, samples: int) -> None:
        # Imported where it is used, so that everything else works on machines without it.
        try:
            import grain
        except ImportError:
            raise DataError("training data: the package grain is missing; pip install grain") from None

        self.samples = samples
        ordered = grain.MapDataset.source(self.windows).seed(self.seed).shuffle().repeat()
        options = grain.ReadOptions(num_threads=min(self.prefetch, 1), prefetch_buffer_size=self.prefetch)
        # An end that no run reaches: without one the length overflows in grain for batches of 1.
        rest = ordered.slice(slice(samples, 1 << 62))
        self._iterator = iter(rest.batch(self.batch).to_iter_dataset(options))

    def __next__(self) -> np.ndarray:
        batch = next(self._iterator)
        self.samples += self.batch
        return batch

    def state(self) -> dict[str, int]:
        return {"samples": self.samples, "seed": self.seed, "windows": len(self.windows)}

    def restore(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise DataError(
                f"seed={self.seed}: the checkpoint's data order was drawn with seed {state['seed']}; "
                f"use --seed {state['seed']} or another --workdir"
            )
        if state["windows"] != len(self.windows):
            raise DataError(
                f"{self.windows.name}: has {len(self.windows)} windows, the checkpoint's data had "
                f"{state['windows']}; use the same data.train and data.sequence_length or another --workdir"
            )
        self._seek(int(state["samples"]))


def batches(config: TrainConfig, tokens: np.ndarray) -> Batches:
    """The training batches of a run."""
    windows = Windows(tokens, config.data.sequence_length, config.model.vocab_size, config.data.train)
    return Batches(windows, config.global_batch, seed=config.seed, prefetch=config.data.prefetch)


def evaluation_batches(config: TrainConfig, tokens: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """The validation windows in order, as {"tokens": int32[B, L + 1], "weights": float32[B, L]}.

    The last batch is filled up with windows of weight 0. Unusable data raises DataError here, not on the first batch.
    """
    if config.evaluation.batches == 0:
        return iter(())
    name = config.data.validation or f"the validation part of {config.data.train}"
    windows = Windows(tokens, config.data.sequence_length, config.model.vocab_size, name)
    batch = config.global_batch
    count = -(-len(windows) // batch)
    if config.evaluation.batches is not None:
        count = min(count, config.evaluation.batches)

    def make(start: int) -> dict[str, np.ndarray]:
        rows = np.arange(start, start + batch)
        real = rows < len(windows)
        tokens_BL = np.stack([windows[i] for i in np.where(real, rows, 0)])
        return {"tokens": tokens_BL, "weights": np.repeat(real[:, None], windows.length, 1).astype(np.float32)}

    return (make(i * batch) for i in range(count))


def device_batch(batch: dict[str, np.ndarray], sharding: Any) -> dict[str, Any]:
    """The arrays of a batch on the devices of `sharding`; every process passes the same whole batch."""
    import jax

    place = lambda array: jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return {name: place(array) for name, array in batch.items()}
