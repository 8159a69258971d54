"""The site table: every communication of a step, recorded while it is traced.

    with sites.record() as table:
        step.lower(...)          # or jax.eval_shape
    for row in table.rows(): ...

A collective is traced once however often it runs (a scanned layer, a microbatch), so bodies that repeat are traced
under `sites.repeat(n)`. A message that is traced again (remat, a scan's second trace) has the same site, direction and
operation and is one row. The table is what was traced, never a formula of its own; a test compares it with the
compiled HLO.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from jax import lax

_table: contextvars.ContextVar[Table | None] = contextvars.ContextVar("taco_jax_sites", default=None)
_calls: contextvars.ContextVar[int] = contextvars.ContextVar("taco_jax_calls", default=1)
_forward_again: contextvars.ContextVar[int] = contextvars.ContextVar("taco_jax_forward_again", default=1)
_mark: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("taco_jax_mark", default=None)

# The site of the gradients' sum over dp, and the start of its buckets' names.
GRADIENTS = "dp/grads"
# Share of a ring or pairwise exchange that leaves the device, per operation: bytes sent = share(P) * bytes of the full
# tensor.
_SENT = {
    "psum": lambda p: 2 * (p - 1) / p,
    "psum_scatter": lambda p: (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "pmax": lambda p: 2 * (p - 1) / p,
    "ppermute": lambda p: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Level:
    """Bytes that one device sends inside its host ("inside") or to other hosts ("between"), among `ranks`; bytes a
    call."""

    name: str
    ranks: int
    codec: str
    bytes: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One message of a site.

    Attributes:
      site, direction: where; "forward" or "backward".
      op: the jax.lax operation that the message stands for. axis: the mesh axes. ranks: how many devices take part.
      elements: of the full tensor on one device (an all_gather's output, a psum_scatter's input). dtype: the values'
        dtype.
      codec: preset name or description. kind: "activation" (TP traffic), "gradient" and "parameter" (messages over dp,
        in buckets), or "other" (scalars, norm weights, a sum of gradients without buckets, Muon's matrices).
      calls: per step. bytes, bytes_bf16: sent by one device per step, as written and as bf16.
      hlo: the compiled collectives of one call, as (opcode, dtype, output elements).
      levels: of a hierarchical message. how: (algorithm, why it is taken) of a compressed sum.
    """

    site: str
    direction: str
    op: str
    axis: tuple[str, ...]
    ranks: int
    elements: int
    dtype: str
    codec: str
    kind: str
    calls: int
    bytes: float
    bytes_bf16: float
    hlo: tuple[tuple[str, str, int], ...]
    levels: tuple[Level, ...] = ()
    how: tuple[str, str] = ("", "")

    def bytes_of(self, level: str) -> float:
        """Sent by one device per step in a level, "inside" or "between"; 0 of a message that has none."""
        return self.calls * sum(part.bytes for part in self.levels if part.name == level)

    @property
    def bits_per_element(self) -> float:
        return 8 * self.bytes / (self.bytes_bf16 / 2) if self.bytes_bf16 else 0.0


class Table:
    """The rows recorded so far."""

    def __init__(self):
        self._rows: dict[tuple, Row] = {}

    def add(self, row: Row) -> None:
        self._rows[row.site, row.direction, row.op, row.axis, row.elements, row.dtype] = row

    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def total(self, kind: str | None = "activation") -> tuple[float, float]:
        """(bytes, bytes as bf16) that one device sends per step; kind=None: all rows."""
        rows = [r for r in self.rows() if kind in (None, r.kind)]
        return sum(r.bytes for r in rows), sum(r.bytes_bf16 for r in rows)

    def by_axis(self) -> dict[str, list[Row]]:
        """All rows by mesh axis: "tp", "pp", "dp", and "several" where a message goes over more."""
        found: dict[str, list[Row]] = {}
        for row in self.rows():
            found.setdefault(row.axis[0] if len(row.axis) == 1 else "several", []).append(row)
        order = ("tp", "pp", "dp", "several")
        return {axis: found[axis] for axis in sorted(found, key=lambda axis: order.index(axis))}

    def codecs(self) -> str:
        """The codecs of each axis and direction, in words; where one has several, with their shares of the values."""
        parts = []
        for axis, rows in self.by_axis().items():
            shares: dict[str, dict[str, float]] = {}
            for row in rows:
                codecs = shares.setdefault(_what(row), {})
                for codec in [level.codec for level in row.levels] or [row.codec]:
                    codecs[codec] = codecs.get(codec, 0) + row.bytes_bf16 / (len(row.levels) or 1)
            shares.pop("", None)
            if shares:
                words = (f"{_shares(codecs)} {what}" for what, codecs in shares.items())
                parts.append(f"{axis} {', '.join(words)}")
        return "; ".join(parts) or "none, for nothing is sent"


def _what(row: Row) -> str:
    """Returns what a message carries, for `Table.codecs`; "" for scalars, norm weights and the like."""
    if row.kind == "activation":
        return row.direction
    if row.kind == "gradient" or row.site == GRADIENTS:
        return "gradients"
    return "weights" if row.kind == "parameter" else ""


def _shares(codecs: dict[str, float]) -> str:
    most = sorted(codecs, key=lambda codec: -codecs[codec])
    total = sum(codecs.values())
    return most[0] if len(most) == 1 else " + ".join(f"{codec} ({codecs[codec] / total:.0%})" for codec in most)


@contextlib.contextmanager
def record() -> Iterator[Table]:
    """Collects the collectives traced inside the block."""
    table = Table()
    token = _table.set(table)
    try:
        yield table
    finally:
        _table.reset(token)


def recording() -> bool:
    """True inside a `record` block. A cached trace would not be recorded again."""
    return _table.get() is not None


@contextlib.contextmanager
def repeat(n: int) -> Iterator[None]:
    """Counts what is traced inside the block n times (nested blocks multiply)."""
    token = _calls.set(_calls.get() * n)
    try:
        yield
    finally:
        _calls.reset(token)


@contextlib.contextmanager
def forward_again(times: int = 2) -> Iterator[None]:
    """Forward messages traced inside the block run `times` as often as backward ones, because they are computed again.

    A message that is traced again is one row, so both traces belong into such a block.
    """
    token = _forward_again.set(times)
    try:
        yield
    finally:
        _forward_again.reset(token)


@contextlib.contextmanager
def marked(kind: str, direction: str) -> Iterator[None]:
    """Collectives traced inside the block, which nobody differentiates, are listed with this kind and direction."""
    token = _mark.set((kind, direction))
    try:
        yield
    finally:
        _mark.reset(token)


def current_calls(direction: str = "backward") -> int:
    """Returns how often a collective traced now runs per step. Forward rules keep it for backward rules, traced much
    later."""
    return _calls.get() * (_forward_again.get() if direction == "forward" else 1)


def share_sent(op: str, ranks: int) -> float:
    """Returns the share of a full tensor's bytes that one device sends in an operation over so many ranks."""
    return _SENT[op](ranks)


def add(
    site, direction, op, axis, ranks, elements, dtype, *, codec="none", kind="activation", calls=None, sent=None,
    hlo=(), levels=(), how=("", ""),
) -> None:  # fmt: skip
    """Records a message if a table is being recorded; `sent` and `hlo` are by default those of the exact operation."""
    table = _table.get()
    if table is None or ranks == 1 or elements == 0:
        return
    calls = current_calls() if calls is None else calls
    if _mark.get() is not None:
        kind, direction = _mark.get()
    share = share_sent(op, ranks)
    sent = share * elements * np.dtype(dtype).itemsize if sent is None else sent
    hlo = hlo or ((HLO_OPCODE[op], str(dtype), elements // ranks if op == "psum_scatter" else elements),)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    bf16 = share * elements * 2
    table.add(
        Row(
            site, direction, op, axes, ranks=ranks, elements=elements, dtype=str(dtype), codec=codec, kind=kind,
            calls=calls, bytes=sent * calls, bytes_bf16=bf16 * calls, hlo=hlo, levels=levels, how=how,
        )
    )  # fmt: skip


def exact(site: str, direction: str, op: str, axis, x, *, kind: str = "other") -> None:
    """Lists an exact collective that the caller issues itself (cross-entropy scalars, norm weights, kv heads).

    `x` is the full tensor (or its ShapeDtypeStruct); `op` the jax.lax name.
    """
    add(site, direction, op, axis, ranks=lax.axis_size(axis), elements=math.prod(x.shape), dtype=x.dtype, kind=kind)


HLO_OPCODE = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
