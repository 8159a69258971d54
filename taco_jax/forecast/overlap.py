"""The order of messages and work where layers go in chains, as `taco_jax.models.overlap` orders it.

A chain's part of a sublayer is a step. The message of a step travels during the next step, which is another chain's:

    step       A0    A1    M0    M1  |  A0    A1    M0    M1        attention A and mlp M of chains 0 and 1
    message          A0    A1    M0  |  M1    A0    A1    M0

In the backward pass the steps come in the opposite order, and what is left of a message goes beside products that make
weight gradients. Encoding comes before a message; decoding is part of the step that waits for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from taco_jax.forecast.cost import Machine
from taco_jax.forecast.work import DOWN, OUT, QKV, UP, Work

HANDED_ON = True
"""A layer's last forward sum is sent with the next layer, beside its first step, and the kernels of the mlp are cast
beside it; a chain's first step waits until the message before it is encoded."""
DECODING_BESIDE = 1.0
"""How many times as long kernels that decode take beside a message: they leave its kernel room."""
LAYERS_A_BODY = 4
"""Where no sum is handed on, layers of a prompt between two messages that are beside nothing."""
SUBLAYERS = ((QKV, OUT), (UP, DOWN))


@dataclasses.dataclass(frozen=True)
class Load:
    """Seconds of products, and of other kernels, which do not change with the clocks."""

    products: float = 0.0
    other: float = 0.0

    def plus(self, other: Load) -> Load:
        return Load(self.products + other.products, self.other + other.other)

    def seconds(self, times: float) -> float:
        """Seconds with products `times` as long."""
        return max(0.0, times * self.products + self.other)


@dataclasses.dataclass(frozen=True)
class Step:
    """A chain's part of a sublayer. site: of its message. parts: between two of them a hop can end. early: what of it
    starts before the message that goes beside it, where HANDED_ON is not."""

    site: str
    parts: tuple[Load, ...]
    early: Load = Load()


@dataclasses.dataclass(frozen=True)
class Sums:
    """Messages of a site in one direction. hops: seconds of each. after: of decoding. calls: of one chain's. longer:
    how much longer what goes beside takes, as a share of the message's time."""

    hops: tuple[float, ...]
    after: float
    calls: float
    longer: float


@dataclasses.dataclass(frozen=True)
class Window:
    """A hop, `calls` times, and what there is beside it. filled: whatever is left goes beside other work too."""

    site: str
    calls: float
    seconds: float
    beside: Load
    longer: float
    filled: bool = False


def load(machine: Machine, items: Iterable[Work], float32: bool = False) -> Load:
    """Returns what pieces of work take."""
    total = Load()
    for item in items:
        seconds = machine.seconds(item, float32=float32)
        multiplies = item.kind in ("product", "attention")
        total = total.plus(Load(seconds, 0.0) if multiplies else Load(0.0, seconds))
    return total


def forward_steps(machine: Machine, chains: Sequence[Sequence[Work]], *, halves: bool = True, float32: bool = False,
                  casts: Sequence[Work] = (), early: bool = False) -> list[Step]:  # fmt: skip
    """Returns a layer's steps. chains: the work of each chain in a layer's forward pass.

    halves: a hop can end before the last product. casts: of weights that wait for nothing, beside the layer's first
    step. early: a second chain's first product starts before the first chain's message.
    """
    steps = []
    for core, last in SUBLAYERS:
        for of_chain in chains:
            parts = [load(machine, (w for w in of_chain if w.site == site), float32) for site in (core, last)]
            if not steps:
                parts[0] = parts[0].plus(load(machine, casts, float32))
            first = [w for w in of_chain if w.site == QKV and w.kind == "product"] if early and core == QKV else []
            parts = parts if halves else [parts[0].plus(parts[1])]
            steps.append(Step(last, tuple(parts), load(machine, first, float32)))
    return steps


def backward_steps(machine: Machine, of_chain: Sequence[Work], chains: int, *, halves: bool = True,
                   float32: bool = False) -> list[Step]:  # fmt: skip
    """Returns a layer's steps. of_chain: what a chain computes again and its gradients; what may wait is left out."""
    steps = []
    for core, last in reversed(SUBLAYERS):
        path = [w for w in of_chain if w.site in (core, last) and not w.beside]
        before = [w for w in path if w.stage != "dx" or w.site == last]
        parts = [load(machine, before, float32), load(machine, (w for w in path if w not in before), float32)]
        parts = parts if halves else [parts[0].plus(parts[1])]
        steps += [Step(core, tuple(parts))] * chains
    return steps


def cut_steps(steps: Sequence[Step], chains: int, sites: Sequence[tuple[str, str]]) -> list[Step]:
    """Returns the steps of a pass with sequence parallelism, in which each sublayer has two messages, one of its input
    and one of its output, each beside half of another chain's sublayer."""
    out = []
    for number, pair in enumerate(sites):
        of_sublayer = steps[number * chains : (number + 1) * chains]
        for site in pair:
            for step in of_sublayer:
                whole = Load(sum(p.products for p in step.parts) / 2, sum(p.other for p in step.parts) / 2)
                out.append(Step(site, (whole,)))
    return out


def windows(steps: Sequence[Step], sums: Mapping[str, Sums], *, alone: float = math.inf, more: float = 0.0,
            filled: bool = False) -> list[Window]:  # fmt: skip
    """Returns what goes beside the messages of one pass.

    alone: how many of the last step's messages are beside nothing; the others go beside the first step. more: of these
    there are, which carry zeros.
    """
    out = []
    for number, step in enumerate(steps):
        if step.site not in sums:
            continue
        of_site, last = sums[step.site], number + 1 == len(steps)
        following = steps[(number + 1) % len(steps)]
        nothing = min(alone, of_site.calls) if last else 0.0
        beside = of_site.calls - nothing + (more if last else 0.0)
        early = following.early if step.early != Load() and following.site == step.site else Load()
        parts = [part.plus(Load(0.0, of_site.after)) if not i else part for i, part in enumerate(following.parts)]
        parts[0] = parts[0].plus(Load(-early.products, -early.other))
        for hop, seconds in enumerate(of_site.hops):
            if len(of_site.hops) == 1:
                at = parts[0] if len(parts) == 1 else parts[0].plus(parts[1])
            else:
                at = parts[hop] if hop < len(parts) else Load()
            for calls, what in ((beside, at), (nothing, Load())):
                if calls:
                    out.append(Window(step.site, calls, seconds, what, longer=of_site.longer, filled=filled))
    return out


def settled(found: Sequence[Window], spare: float, times: float) -> dict[str, tuple[float, float]]:
    """Returns {site: (seconds that messages are seen, seconds that they are hidden)}.

    spare: seconds of what waits for nothing, which `filled` windows share. times: how many times as long products take.
    """
    over = [w.calls * max(0.0, w.seconds - w.beside.seconds(times)) for w in found]
    wanted = sum(o for o, w in zip(over, found) if w.filled)
    left = max(0.0, wanted - spare) / wanted if wanted else 0.0
    out: dict[str, tuple[float, float]] = {}
    for o, w in zip(over, found):
        alone = o * left if w.filled else o
        hidden = w.calls * w.seconds - alone
        messages, before = out.get(w.site, (0.0, 0.0))
        out[w.site] = messages + alone + w.longer * hidden, before + hidden
    return out
