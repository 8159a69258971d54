"""One recommendation in words: which codec, from what size and up to what speed of the link it pays, how sure it is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from taco_jax.compression import recommended
from taco_jax.forecast.constants import ERRORS, load
from taco_jax.forecast.cost import Machine, wire_bytes
from taco_jax.forecast.links import MOST_GB_S
from taco_jax.forecast.messages import EXACT, SiteMessage
from taco_jax.forecast.predict import Forecast
from taco_jax.forecast.recommend import within
from taco_jax.forecast.record import Loss, bound

Predict = Callable[[Machine, str], Forecast]
LEAST_GAIN = 1.02
"""Times as fast from which a codec is recommended: smaller gains are within the forecast's own median error."""
ALIKE = 1.01
SMALL_MODEL = 1e9
"""Parameters up to which the errors are those of the small models that were measured, of at most 350M."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A codec with its forecast and its record."""

    codecs: str
    forecast: Forecast
    speedup: float
    loss: Loss | None


@dataclasses.dataclass(frozen=True)
class Advice:
    """best: None where exact is best. least_bytes: of a message from which the codec pays, None: of none. most_gb_s: of
    the link up to which it pays; inf where it pays beyond all, 0 where nowhere."""

    best: Choice | None
    least_bytes: int | None
    most_gb_s: float
    text: str
    sure: tuple[str, ...]


def choose(choices: Sequence[Choice], limit: float) -> Choice | None:
    """The fastest of those whose recorded loss is within the limit; of codecs about as fast the one with the least.

    None where exact is as fast. A codec without a record is never chosen.
    """
    fit = [c for c in choices if c.loss is not None and c.loss.change <= limit and c.speedup >= LEAST_GAIN]
    if not fit:
        return None
    fastest = max(c.speedup for c in fit)
    return min((c for c in fit if c.speedup * ALIKE >= fastest), key=lambda c: c.loss.change)


def least_bytes(machine: Machine, message: SiteMessage, codec, *, nvlink: bool = True) -> int | None:
    """Bytes of a tensor, a power of two from 4 KiB to 4 GiB, from which its sum is faster in the codec; None: of
    none."""
    width = message.per_token or 128
    found = None
    for power in range(32, 11, -1):
        elements = max(width, (1 << power) // message.size)
        at = dataclasses.replace(message, elements=elements, codec=codec, calls=1)
        if not pays(machine, at, nvlink=nvlink):
            break
        found = 1 << power
    return found


def pays(machine: Machine, message: SiteMessage, *, nvlink: bool = True) -> bool:
    """Returns whether one message alone is faster in its codec than exactly."""
    sizes = {"dp": 1, "pp": 1, "tp": message.ranks}
    local, hosts = machine.spread("tp", sizes)
    exact = machine.exact_seconds(dataclasses.replace(message, codec=EXACT), local, hosts)
    if hosts == 1 and machine.one_kernel(machine.link, message.ranks, nvlink):
        at = min(machine.link.kernel, key=lambda n: abs(n - message.ranks))
        sent = 2 * (message.ranks - 1) / message.ranks * wire_bytes(message.codec, message)
        return machine.link.kernel[at].seconds(sent, message.elements) < exact
    return sum(machine.compressed_seconds(message, local, hosts)) < exact


def most_gb_s(predict: Predict, machine: Machine, codecs: str) -> float:
    """The speed of the link up to which the codec makes the whole 2 % faster and more, by bisection; inf: at every
    speed, 0: at none. Over several hosts it is the link between them."""
    outside = machine.hosts > 1

    def faster(gb_s: float) -> bool:
        links = {"between": machine.between.at(gb_s)} if outside else {"link": machine.link.at(gb_s)}
        at = dataclasses.replace(machine, **links)
        return predict(at, codecs).seconds * LEAST_GAIN <= predict(at, "none").seconds

    low, high = 0.05, MOST_GB_S
    if not faster(low):
        return 0.0
    if faster(high):
        return math.inf
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return low


def describe(choice: Choice | None, least: int | None, most: float, choices: Sequence[Choice], limit: float,
             use: str) -> str:  # fmt: skip
    """The recommendation."""
    what = "loss" if use == "training" else "perplexity"
    if choice is None:
        fastest = max(choices, key=lambda c: c.speedup, default=None)
        if fastest is None or fastest.speedup < LEAST_GAIN:
            return "exact: no codec gains 2 % here"
        return (
            f"exact: {fastest.codecs} would gain {fastest.speedup:.2f}x, but no codec with a gain has a recorded "
            f"change of the {what} within {100 * limit:g} %"
        )
    parts = [f"{choice.codecs}: {choice.speedup:.2f}x"]
    if least is not None:
        parts.append(f"messages below {_size(least)} exact" if least > 4096 else "messages of every size")
    if math.isinf(most):
        parts.append("at every speed of the link")
    elif most:
        parts.append(f"at {float(f'{most:.2g}'):g} GB/s and more it no longer pays")
    return "; ".join([*parts, f"{what} {choice.loss} by {choice.loss.source}"])


def against_auto(choice: Choice | None, use: str) -> str:
    """Returns what `auto` takes in a use of `recommended.json`, and why, where that is not the choice; else nothing."""
    takes, backward = recommended.recommended(use)
    takes = takes if backward == takes else f"{takes}:{backward}"
    if choice is not None and choice.codecs in (takes, f"{takes}:{takes}"):
        return ""
    rule = f"the fewest bytes whose recorded change with its standard error is within {100 * bound():g} %"
    if choice is None:
        return f"\nauto takes {takes} all the same, {rule}: it looks at no link; name none"
    if choice.loss.error is None:
        why = f"{choice.codecs} has one run"
    elif within(choice.loss, bound()):
        why = f"{choice.codecs} is faster here, with more bytes or a larger change"
    else:
        why = f"that of {choice.codecs} is {100 * (choice.loss.change + choice.loss.error):.2f} %"
    return f"\nauto takes {takes}, {rule}; {why}"


def _size(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def sure(machine: Machine, use: str, tp: int, parameters: float = 7e9, chains: int = 1) -> tuple[str, ...]:
    """How sure a forecast of a model of so many parameters, in so many chains, is: its error against what was measured,
    and what of its input was not."""
    errors = load(ERRORS)
    of_steps = "small steps" if parameters <= SMALL_MODEL else "steps of 7B"
    group = errors["groups"]["first token" if use == "first_token" else of_steps]
    lines = [
        f"error of this forecast against {group['rows']} measured {group['what']}: median "
        f"{100 * group['median']:.1f} %, worst {100 * group['worst']:.1f} % (docs/forecast.md)"
    ]
    lines += [f"assumed: {text}" for text in (*machine.gpu.assumed, *machine.link.assumed)]
    if machine.link.name == "nvlink" and tp > 1:
        rate = machine.link.exact_gb_s(tp)
        lines.append(f"exact sums: NCCL's ring at {rate:.0f} GB/s, multicast (NVLS) off; --link nvls has it on")
    measured = load()["memory"]["share_of_sheet"]
    if machine.measured:
        lines.append(f"measured here: {', '.join(machine.measured['what'])}")
    elif machine.gpu.name not in measured:
        lines.append(f"assumed: {machine.gpu.name} reaches as much of its peak and of its memory as H100 and H200")
    if machine.kernels == "triton":
        lines.append("assumed: Triton kernels are as fast for their memory as Mosaic's; they are not measured")
    if machine.link.kind in ("nvlink", "host") and tp not in (1, 2, 4):
        lines.append(f"assumed: {tp} ranks share the link as 4 do, the most that were measured")
    if machine.link.kind == "measured" and tp > 1 and tp not in machine.link.hop:
        lines.append(f"assumed: {tp} ranks share the link as the {min(machine.link.hop)} that were measured")
    if chains > 1:
        exact = "no exact one" if use == "first_token" else "an exact one over NVLink alone"
        lines.append(
            f"assumed: a layer's last sum goes beside the next layer; compressed sums in chains were measured at tp 2 "
            f"over host memory without that, {exact}"
        )
    if machine.hosts > 1:
        lines.append("assumed: messages over several hosts; nothing has been measured there")
    return tuple(lines)
