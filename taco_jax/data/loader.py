"""Batches of token windows, in an order that depends on the seed alone, from any position on.

Letters: B sequences of a batch, L predicted tokens of a sequence; a window has L + 1 tokens, the last of which is only
predicted. Windows do not overlap in their predicted tokens.

The position of the iterator is one number, `samples`: the windows handed out since the start of the run. It depends on
neither the mesh, nor the processes, nor the batch size, so a run goes on with the next unseen window on any of them.
Every process makes the whole batch and gives its devices their rows: reading is cheap, and the order is everywhere
equal.

Of several sources, window k of the run is a function of k, the seed and the weights alone: Grain shuffles each source
by itself and repeats it, and `Interleaved` says which source has the k-th window. Without weights one epoch is a
shuffle of the windows of all sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from taco_jax.config import TrainConfig
from taco_jax.data.sources import Mixture
from taco_jax.data.stream import TokenStream
from taco_jax.data.tokens import DataError, check_ids

# An end that no run reaches: without one lengths overflow in grain for batches of 1.
ENDLESS = 1 << 62


class Windows:
    """Random access to the windows int32[L + 1] of `tokens`; every window's ids are checked when it is read."""

    def __init__(self, tokens: TokenStream | np.ndarray, length: int, vocab_size: int, name: str):
        self.tokens, self.length, self.vocab_size, self.name = tokens, length, vocab_size, name
        if len(tokens) < length + 1:
            fits = f" or a sequence_length of at most {len(tokens) - 1}" if len(tokens) > 1 else ""
            raise DataError(
                f"{name}: too short: {len(tokens)} tokens, one window needs data.sequence_length + 1 = "
                f"{length + 1}; use a longer file{fits}"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self.length
        window = self.tokens[start : start + self.length + 1]
        check_ids(window, self.vocab_size, self.name, start)
        return window.astype(np.int32)

    def digest(self) -> str:
        return (self.tokens if isinstance(self.tokens, TokenStream) else TokenStream([self.tokens])).digest()

    def __repr__(self) -> str:
        return f"Windows({self.name}, {len(self)} of {self.length})"


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Which source has the k-th window of a mixture, and which of its windows that is, for any k.

    Of every `sum(proportions)` windows each source has exactly its proportion. Grain's own `MapDataset.mix` rounds
    weights to hundredths of the smallest one.
    """

    proportions: tuple[int, ...]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, k: int) -> tuple[int, int]:
        """Returns (source, index of the window among those of the source, which go on counting over its epochs)."""
        # The first source has the windows at which its count goes up; the others share what is left in the same way.
        before, after, rest = k, k + 1, sum(self.proportions)
        for source, proportion in enumerate(self.proportions):
            left_before, left_after = before * (rest - proportion) // rest, after * (rest - proportion) // rest
            if left_before == left_after:
                return source, before - left_before
            before, after, rest = left_before, left_after, rest - proportion
        raise AssertionError("the last source has all that is left")


class Batches(Iterator[np.ndarray]):
    """An endless iterator of int32[B, L + 1] over shuffled windows, one order per epoch, drawn from `seed`.

    sources: windows of one source or of several. proportions: how many windows of each follow another; None: each
    window comes once in an epoch.

    `state()` is {"samples": windows handed out, "seed": seed, "windows": windows of all sources, "sources": [{"name",
    "windows", "proportion", "digest": of its tokens}, ...]}; `restore(state)` goes on after them, with any batch size.
    Another seed, other data or other weights would repeat and skip windows: all raise DataError. States without
    "sources" are those of one source, of versions before.
    """

    def __init__(
        self,
        sources: Windows | Sequence[Windows],
        batch: int,
        *,
        seed: int,
        prefetch: int = 2,
        proportions: tuple[int, ...] | None = None,
    ):
        self.sources = (sources,) if isinstance(sources, Windows) else tuple(sources)
        self.proportions, self.batch, self.seed, self.prefetch = proportions, batch, seed, prefetch
        self.windows = sum(map(len, self.sources))
        self._digests: list[str] | None = None
        self._seek(0)

    def _seek(self, samples: int) -> None:
        # Imported where it is used, so that everything else works on machines without it.
        try:
            import grain
        except ImportError:
            raise DataError("training data: the package grain is missing; pip install grain") from None

        self.samples = samples
        sources = [grain.MapDataset.source(windows) for windows in self.sources]
        if self.proportions is None:
            joined = sources[0] if len(sources) == 1 else grain.MapDataset.concatenate(sources)
            ordered = joined.seed(self.seed).shuffle().repeat()
        else:
            own = [
                source.seed(_seed_of_source(self.seed, place)).shuffle().repeat()
                for place, source in enumerate(sources)
            ]
            ordered = grain.MapDataset.select_from_datasets(own, Interleaved(self.proportions))
        options = grain.ReadOptions(num_threads=min(self.prefetch, 1), prefetch_buffer_size=self.prefetch)
        rest = ordered.slice(slice(samples, ENDLESS))
        self._iterator = iter(rest.batch(self.batch).to_iter_dataset(options))

    def __next__(self) -> np.ndarray:
        batch = next(self._iterator)
        self.samples += self.batch
        return batch

    def describe(self) -> str:
        """Returns the names of the sources, with the share of the windows that each has where there are several."""
        if len(self.sources) == 1:
            return self.sources[0].name
        parts = self.proportions or tuple(map(len, self.sources))
        return ", ".join(f"{w.name} {part / sum(parts):.2%}" for w, part in zip(self.sources, parts, strict=True))

    def state(self) -> dict[str, Any]:
        sources = [
            {"name": windows.name, "windows": len(windows), "proportion": proportion, "digest": digest}
            for windows, proportion, digest in zip(self.sources, self._proportions(), self._digest(), strict=True)
        ]
        return {"samples": self.samples, "seed": self.seed, "windows": self.windows, "sources": sources}

    def restore(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise DataError(
                f"seed={self.seed}: the checkpoint's data order was drawn with seed {state['seed']}; "
                f"use --seed {state['seed']} or another --workdir"
            )
        before = state.get("sources", [{"windows": state["windows"]}])
        if len(before) != len(self.sources):
            raise DataError(
                f"data.train: the number of sources is {len(self.sources)}, the checkpoint's data had {len(before)} "
                f"({_named(before)}); use the same data.train or another --workdir"
            )
        for windows, source in zip(self.sources, before, strict=True):
            if source["windows"] != len(windows):
                raise DataError(
                    f"{windows.name}: has {len(windows)} windows, the checkpoint's data had {source['windows']}; use "
                    f"the same data.train and data.sequence_length or another --workdir"
                )
        if "sources" in state:
            self._check_same(before)
        self._seek(int(state["samples"]))

    def _check_same(self, before: Sequence[dict[str, Any]]) -> None:
        """Raises DataError where weights or tokens are not those of the state's sources."""
        for windows, source, digest in zip(self.sources, before, self._digest(), strict=True):
            if source["digest"] != digest:
                raise DataError(
                    f"{windows.name}: holds other tokens than the checkpoint's data ({source['name']}); use the same "
                    f"data.train, in its order, or another --workdir"
                )
        weights = [source["proportion"] for source in before]
        if weights != list(self._proportions()):
            raise DataError(
                f"data.train: the weights of {', '.join(windows.name for windows in self.sources)} are "
                f"{_ratio(self._proportions())}, the checkpoint's were {_ratio(weights)}; use the same weights or "
                f"another --workdir"
            )

    def _proportions(self) -> Sequence[int | None]:
        return self.proportions or (None,) * len(self.sources)

    def _digest(self) -> list[str]:
        if self._digests is None:
            self._digests = [windows.digest() for windows in self.sources]
        return self._digests


def _seed_of_source(seed: int, place: int) -> int:
    """Returns the seed of one source's order, so that sources of one size are not shuffled alike."""
    return int(np.random.SeedSequence((seed, place)).generate_state(1)[0])


def _named(sources: Sequence[dict[str, Any]]) -> str:
    return ", ".join(source.get("name", "one that it does not name") for source in sources)


def _ratio(proportions: Sequence[int | None]) -> str:
    return "by size" if None in proportions else ":".join(map(str, proportions))


def batches(config: TrainConfig, training: Mixture) -> Batches:
    """Returns the training batches of a run."""
    length, vocab_size = config.data.sequence_length, config.model.vocab_size
    windows = [Windows(source.tokens, length, vocab_size, source.name) for source in training.sources]
    return Batches(
        windows,
        config.global_batch,
        seed=config.seed,
        prefetch=config.data.prefetch,
        proportions=training.proportions,
    )


def evaluation_batches(config: TrainConfig, tokens: TokenStream | np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """The validation windows in order, as {"tokens": int32[B, L + 1], "weights": float32[B, L]}.

    The last batch is filled up with windows of weight 0. Unusable data raises DataError here, not on the first batch.
    """
    if config.evaluation.batches == 0:
        return iter(())
    names = ", ".join(source.name for source in config.data.sources)
    name = config.data.validation or f"the validation part of {names}"
    try:
        windows = Windows(tokens, config.data.sequence_length, config.model.vocab_size, name)
    except DataError as error:
        raise DataError(f"{error}, other data.validation, or evaluation.batches=0 for a run without it") from None
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
