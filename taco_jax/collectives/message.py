"""What every hop of a message shares: codec, site scale, keys and the measure that the amax slot receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import sites
from taco_jax.codec import Codec
from taco_jax.collectives.region import AxisName, to_varying

Hops = list[tuple[str, int]]  # (HLO opcode, uint8 elements of its output on one device)


@dataclasses.dataclass(frozen=True)
class Label:
    """Where a message belongs in the site table."""

    site: str = ""
    direction: str = "forward"
    calls: int = 1


@dataclasses.dataclass(frozen=True)
class Message:
    """The static part of one message: hashable, so that a custom_vjp can carry it.

    with_stats: the measure has `len(codec.STATS)` entries instead of the amax alone.
    backend, chunks, exchange, link: arguments of the collectives (`api.py`).
    """

    axis: AxisName
    codec: Codec
    algorithm: str = "auto"
    with_stats: bool = False
    label: Label = Label()
    backend: str = "auto"
    chunks: int = 1
    exchange: str = "all_to_all"
    link: str = "auto"

    @property
    def ranks(self) -> int:
        return lax.axis_size(self.axis)

    @property
    def in_one_shot(self) -> bool:
        """Whether an all-reduce is one-shot: as asked for, or the exchange of two ranks."""
        return self.algorithm == "one_shot" or (self.algorithm == "auto" and self.ranks == 2)

    def key(self, key: jax.Array | None, hop: int, chunk: int = 0) -> jax.Array | None:
        """A key of its own for every hop, direction, chunk and rank: equal noise would not average out."""
        if key is None or self.codec.rounding == "nearest":
            return None
        key = jax.random.fold_in(key, 4 * chunk + 2 * hop + (self.label.direction == "backward"))
        return jax.random.fold_in(to_varying(key, self.axis), lax.axis_index(self.axis))

    def record(self, op: str, elements: int, dtype, hops: Hops) -> None:
        """Lists the message and its hops in the site table."""
        p = self.ranks
        sent = sum(size * {"collective-permute": 1.0}.get(opcode, (p - 1) / p) for opcode, size in hops)
        sites.add(
            self.label.site, self.label.direction, op, self.axis, p, elements, dtype,
            codec=self.codec.name, calls=self.label.calls, sent=sent, hlo=tuple((o, "uint8", n) for o, n in hops),
        )  # fmt: skip


def merge(measures: Sequence[jax.Array]) -> jax.Array:
    """Measures of several hops and chunks as one: the largest scale, the summed statistics."""
    total = measures[0]
    for measure in measures[1:]:
        largest = jnp.maximum(total[:1], measure[:1])
        # Without statistics there is nothing to join, and XLA on CPU crashes on joining nothing (jax 0.11).
        total = largest if total.size == 1 else jnp.concatenate([largest, total[1:] + measure[1:]])
    return total
