"""`Message`: the static part that every hop of a message shares: codec, site scale, keys and the measure that the amax
slot receives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import ELEMENTS, UNCALIBRATED
from taco_jax.codec import Codec, tah
from taco_jax.collectives import comm_log, topology
from taco_jax.collectives.manual_region import AxisName, to_varying
from taco_jax.compression.compression import Compression

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

      compression: as given to the collective; what it leaves open is decided in `algorithm`, `chunks` and `exchange`.
      codec: of this direction; exact where the message is too small.
      why: the algorithm is this one, where it was measured; else empty.
      local: ranks of a host, where the message goes in levels (`hierarchical.py`); 0 where it does not. between: its
        codec between hosts.
      with_stats: the measure has `len(codec.STATS)` entries instead of the amax alone.
      group: the ranks that exchange it, where it is one level of another message; None: all of the axis.
      feedback: an all-reduce's result is (sum, this rank's error), see `error_feedback.py`.
    separate: kernels around NCCL's collectives were measured as the fastest, so that it is no kernel over NVLink.
    """

    axis: AxisName
    compression: Compression
    codec: Codec
    label: Label = Label()
    _: dataclasses.KW_ONLY
    algorithm: str = "auto"
    why: str = ""
    chunks: int = 1
    exchange: str = "all_to_all"
    local: int = 0
    between: Codec | None = None
    with_stats: bool = False
    group: topology.Group | None = None
    feedback: bool = False
    separate: bool = False

    @property
    def backend(self) -> str:
        return self.compression.backend

    @property
    def link(self) -> str:
        c = self.compression
        link = c.link if c.backward_link is None or self.label.direction == "forward" else c.backward_link
        return "nccl" if self.separate and link != "copy" else link

    @property
    def ranks(self) -> int:
        """Returns how many ranks exchange the message."""
        return lax.axis_size(self.axis) if self.group is None else self.group.size

    @property
    def rank(self) -> jax.Array:
        """This rank's place among them."""
        rank = lax.axis_index(self.axis)
        return rank if self.group is None else rank // self.group.stride % self.group.size

    @property
    def groups(self) -> list[list[int]] | None:
        """`axis_index_groups` of its collectives."""
        return None if self.group is None else self.group.of(lax.axis_size(self.axis))

    def level(self, name: str) -> Message:
        """The "inside" or "between" level of a hierarchical message, as a message of its own."""
        ranks = lax.axis_size(self.axis)
        if name == "inside":
            codec, group = self.codec, topology.inside(self.local)
        else:
            codec, group = self.between, topology.between(ranks, self.local)
        return dataclasses.replace(self, codec=codec, group=group, local=0, between=None, algorithm="auto", why="")

    @property
    def in_one_shot(self) -> bool:
        """Returns whether an all-reduce is one-shot: as asked for, or the exchange of two ranks."""
        return self.algorithm == "one_shot" or (self.algorithm == "auto" and self.ranks == 2)

    @property
    def how(self) -> tuple[str, str]:
        """(algorithm, why it is taken) of an all-reduce."""
        if self.local:
            return "hierarchical", "its ranks are on several hosts"
        name = "one_shot" if self.in_one_shot else "two_shot"
        return name, self.why or ("as configured" if self.algorithm == name else f"the rule for {self.ranks} ranks")

    def key(self, key: jax.Array | None, hop: int, chunk: int = 0, rank=None) -> jax.Array | None:
        """A key of its own for every hop, direction, chunk and rank: equal noise would not average out.

        rank: whose noise it is; None: this rank's own, of the whole axis.
        """
        if key is None or self.codec.rounding == "nearest":
            return None
        key = jax.random.fold_in(key, 4 * chunk + 2 * hop + (self.label.direction == "backward"))
        return jax.random.fold_in(to_varying(key, self.axis), lax.axis_index(self.axis) if rank is None else rank)

    def record(self, op: str, elements: int, dtype, hops: Hops, between: Hops = ()) -> None:
        """Lists the message and its hops in the site table; of a hierarchical one `hops` are those inside hosts."""
        all_hops, levels = [*hops, *between], ()
        if self.local:
            of_levels = ((name, self.level(name), some) for name, some in (("inside", hops), ("between", between)))
            levels = tuple(comm_log.Level(n, m.ranks, m.codec.name, _sent(some, m.ranks)) for n, m, some in of_levels)
        sent = sum(level.bytes for level in levels) if levels else _sent(hops, self.ranks)
        comm_log.add(
            self.label.site, self.label.direction, op, self.axis, ranks=self.ranks, elements=elements, dtype=dtype,
            levels=levels, how=self.how if op == "psum" else ("", ""),
            codec=self.codec.name, calls=self.label.calls, sent=sent, hlo=tuple((o, "uint8", n) for o, n in all_hops),
        )  # fmt: skip


def _sent(hops: Hops, ranks: int) -> float:
    """Bytes that leave a device in hops among so many ranks."""
    return sum(size * {"collective-permute": 1.0}.get(opcode, (ranks - 1) / ranks) for opcode, size in hops)


def in_units_of(own: Codec, other: Codec, measure: jax.Array) -> jax.Array:
    """A measure of messages in codec `other` as one of `own`: a scale is a block's maximum / Qmax."""
    if (ratio := _ratio(own, other)) == 1:
        return measure
    return jnp.concatenate([measure[:1] / ratio, measure[1:]]) if measure.size > 1 else measure / ratio


def exponent_of(own: Codec, other: Codec, exponent):
    """The exponent of codec `own`'s site scale for a message in codec `other`, whose scales are so much larger."""
    if exponent is None or (ratio := _ratio(own, other)) == 1:
        return exponent
    return jnp.where(exponent == UNCALIBRATED, exponent, exponent + math.ceil(math.log2(ratio)))


def _ratio(own: Codec, other: Codec) -> float:
    return _maximum(own) / _maximum(other)


def _maximum(codec: Codec) -> float:
    # What `tah` measures is of its 4-bit blocks, whose maximum it takes for all.
    return (tah.HIGH if codec.element == tah.ELEMENT else ELEMENTS[codec.element]).maximum


def merge(measures: Sequence[jax.Array]) -> jax.Array:
    """Measures of several hops and chunks as one: the largest scale, the summed statistics."""
    total = measures[0]
    for measure in measures[1:]:
        largest = jnp.maximum(total[:1], measure[:1])
        # Without statistics there is nothing to join, and XLA on CPU crashes on joining nothing (jax 0.11).
        total = largest if total.size == 1 else jnp.concatenate([largest, total[1:] + measure[1:]])
    return total
