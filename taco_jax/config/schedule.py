"""Which stage does what in which tick. Numbers alone: nothing here needs a JAX backend.

A stage's work items are numbered 0, 1, ... in the order in which it does them; stage s does item w in tick w + s. With
one chunk a stage (GPipe, 1F1B's forward passes) item w is microbatch w. With v chunks (circular; Megatron-LM's
interleaved schedule, Narayanan et al., arXiv 2104.04473) microbatches go in groups of as many as there are stages, S:

    w = group S v + chunk S + (microbatch mod S)

What the last stage makes of a chunk arrives at the first one S items later, just when it is the next chunk's turn, so
nothing has to wait in a buffer. A last group that is not full leaves its places empty.
"""

from __future__ import annotations

import dataclasses

SCHEDULES = ("gpipe", "circular", "1f1b")

SHARED_VOCABULARY = 16_384
"""Ids of a device from which stages share the loss out. Sharing saves (S - 1) / S of the head's time, 6 D V / 6e14 s
a token at 600 TFLOP/s, for 2 messages of 2 D bytes times (S - 1) / S: both are equal at 20,000 ids over a link of
20 GB/s, and at 2,700 over one of 150."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule of `microbatches` through `stages`, each of `chunks` parts; more than one are "circular" only."""

    kind: str
    stages: int
    microbatches: int
    chunks: int = 1

    def item(self, microbatch: int, chunk: int = 0) -> int:
        """The number of the work item of a microbatch and chunk."""
        if self.chunks == 1:
            return microbatch
        group, place = divmod(microbatch, self.stages)
        return (group * self.chunks + chunk) * self.stages + place

    def work(self, item):
        """(microbatch, chunk, whether there is such work) of an item, an int or an integer array."""
        if self.chunks == 1:
            microbatch, chunk = item, 0 * item
        else:
            group, rest = item // (self.stages * self.chunks), item % (self.stages * self.chunks)
            microbatch, chunk = group * self.stages + rest % self.stages, rest // self.stages
        return microbatch, chunk, (item >= 0) & (microbatch < self.microbatches)

    @property
    def items(self) -> int:
        """The number of items up to the last that is work."""
        return 1 + self.item(self.microbatches - 1, self.chunks - 1)

    @property
    def forward_ticks(self) -> int:
        """Ticks of all forward passes together."""
        return self.items + self.stages - 1

    @property
    def ticks(self) -> int:
        """Ticks of a training step: those of gpipe and circular are gone through forward, then backward; those of 1f1b
        hold both passes, one microbatch each."""
        return self.microbatches + 2 * (self.stages - 1) if self.kind == "1f1b" else self.forward_ticks

    @property
    def in_flight(self) -> int:
        """Microbatches whose inputs a stage keeps at once: those of 1f1b do not grow with their number."""
        return min(self.microbatches, 2 * self.stages - 1) if self.kind == "1f1b" else self.microbatches

    def shares_head(self, sequences: int, vocabulary: int, tp: int) -> bool:
        """Returns whether each stage takes a part of the loss of so many sequences, which come from the last stage.

        Not with 1f1b, whose last stage takes the loss while the others run their layers again.
        """
        return self.kind != "1f1b" and sequences % self.stages == 0 and vocabulary >= SHARED_VOCABULARY * tp

    @property
    def bubble(self) -> float:
        """The share of its time in which a stage has nothing to do: (S - 1) / (m v + S - 1) with full groups.

        A tick of 1f1b in which one of the two passes is empty is a short one, so its share is gpipe's.
        """
        return 1 - self.microbatches * self.chunks / self.forward_ticks
