"""What every hop of a message shares: codec, site scale, keys and the measure that the amax slot receives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import sites
from taco_jax.codec import Codec
from taco_jax.collectives.region import AxisName, to_varying


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
    """

    axis: AxisName
    codec: Codec
    algorithm: str = "auto"
    with_stats: bool = False
    label: Label = Label()

    @property
    def ranks(self) -> int:
        return lax.axis_size(self.axis)

    def key(self, key: jax.Array | None, hop: int) -> jax.Array | None:
        """A key of its own for every hop, direction and rank: equal noise on all ranks would not average out."""
        if key is None or self.codec.rounding == "nearest":
            return None
        key = jax.random.fold_in(key, 2 * hop + (self.label.direction == "backward"))
        return jax.random.fold_in(to_varying(key, self.axis), lax.axis_index(self.axis))

    def record(self, op: str, elements: int, dtype, hops: list[tuple[str, int]]) -> None:
        """Lists the message: `hops` are (HLO opcode, uint8 elements of its output on one device)."""
        p = self.ranks
        sent = sum(size * {"collective-permute": 1.0}.get(opcode, (p - 1) / p) for opcode, size in hops)
        sites.add(
            self.label.site, self.label.direction, op, self.axis, p, elements, dtype,
            codec=self.codec.name, calls=self.label.calls, sent=sent, hlo=tuple((o, "uint8", n) for o, n in hops),
        )  # fmt: skip


def merge(first: jax.Array, second: jax.Array) -> jax.Array:
    """Measures of two hops as one: the larger scale, the summed statistics."""
    return jnp.concatenate([jnp.maximum(first[:1], second[:1]), first[1:] + second[1:]])
