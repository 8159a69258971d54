"""Links: what carries messages, as a latency and a rate for each kind of message and number of ranks.

nvlink, host         measured on H200 (experiments/fit_forecast.py), NVLink's multicast (NVLS) off
nvls                 nvlink, with exact sums as fast as published where NVSwitches add them up (NVLS); by arithmetic
pcie4x16, pcie5x8    PCIe of a generation and width, peer to peer
12GB/s,15us          what one GPU sends in one direction, and how long an empty message takes
100Gb/s, 100Gbps     the same in bits
measured             what `--measure` left on this machine
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from taco_jax.errors import ConfigError, did_you_mean
from taco_jax.forecast.constants import load
from taco_jax.forecast.hardware import Gpu

EXAMPLES = "12GB/s,15us, 100Gb/s, nvlink, nvls, host, pcie4x16 or measured"
# NCCL's bus bandwidth of large exact sums with NVLS by ranks, on H100: https://github.com/NVIDIA/nccl/issues/1455, and
# of eight https://github.com/NVIDIA/nccl-tests/issues/212 and /272 (475 on H200). Its ring has 365 to 370 for 2 to 8.
NVLS_GB_S = {2: 370.0, 4: 370.0, 8: 480.0}
UNITS = "GB/s (bytes) or Gb/s (bits), or with M or T in the place of G; then perhaps a latency in us"
# PCI Express Base Specification: GT/s of a lane, and the share of bits that are data (128b/130b).
PCIE_GT_S = {3: 8, 4: 16, 5: 32, 6: 64}
PCIE_ENCODING = 128 / 130
# Of a packet of 256 bytes, 24 more are headers, framing and checksum (the same specification).
PCIE_PAYLOAD = 256 / (256 + 24)
# Twice the nominal rate is where the range of link speeds ends that is searched for a break-even.
MOST_GB_S = 4000.0
# PCIe 5 with 16 lanes has 63, the NVLink of an A40 has 56 by its data sheet, and others 100 and more.
LEAST_NVLINK_GB_S = 80.0


@dataclasses.dataclass(frozen=True)
class Rate:
    """A message's time is us + bytes / gb_s, bytes being what one GPU sends."""

    us: float
    gb_s: float

    def seconds(self, sent: float) -> float:
        return self.us * 1e-6 + sent / (self.gb_s * 1e9)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A sum in one kernel over NVLink takes us + bytes / gb_s + ns for each element."""

    us: float
    gb_s: float
    ns: float

    def seconds(self, sent: float, elements: float) -> float:
        return self.us * 1e-6 + sent / (self.gb_s * 1e9) + 1e-9 * self.ns * elements


@dataclasses.dataclass(frozen=True)
class Link:
    """A link. exact, hop: ranks -> Rate of an exact all-reduce, and of one hop of a compressed message.

    kernel: ranks -> Kernel, where sums can be one kernel. kind: nvlink, host, pcie, given or measured. source: where
    the figures are from. assumed: what of them was not measured.
    """

    name: str
    kind: str
    exact: dict[int, Rate]
    hop: dict[int, Rate]
    kernel: dict[int, Kernel] = dataclasses.field(default_factory=dict)
    source: str = ""
    assumed: tuple[str, ...] = ()

    def all_reduce(self, ranks: int, nbytes: float) -> float:
        """Seconds of an exact all-reduce of `nbytes` by NCCL's ring, or its tree where that has fewer steps."""
        at, rate = _nearest(self.exact, ranks)
        return Rate(rate.us * steps(ranks) / steps(at), rate.gb_s).seconds(2 * (ranks - 1) / ranks * nbytes)

    def half_reduce(self, ranks: int, nbytes: float) -> float:
        """Seconds of an exact reduce-scatter or all-gather, half of an all-reduce."""
        return self.all_reduce(ranks, nbytes) / 2

    def send(self, ranks: int, sent: float) -> float:
        """Seconds of one hop among `ranks` in which each sends so many bytes."""
        at, rate = _nearest(self.hop, ranks)
        start = min(rate.us, load()["links"]["start_us"])
        return Rate(start + (rate.us - start) * hop_steps(ranks) / hop_steps(at), rate.gb_s).seconds(sent)

    @property
    def is_nvlink(self) -> bool:
        """Returns whether it is NVLink, or was measured as fast as that."""
        return self.kind == "nvlink" or self.kind == "measured" and self.gb_s(2) > LEAST_NVLINK_GB_S

    def gb_s(self, ranks: int) -> float:
        """The rate of its hops."""
        return _nearest(self.hop, ranks)[1].gb_s

    def exact_gb_s(self, ranks: int) -> float:
        """The rate of its exact sums: NCCL's bus bandwidth of large ones."""
        return _nearest(self.exact, ranks)[1].gb_s

    def at(self, gb_s: float) -> Link:
        """The link as if it carried so much: latencies stay, all rates change alike, NVLink kernels are off."""
        factor = gb_s / self.gb_s(2)
        scaled = lambda rates: {n: Rate(r.us, r.gb_s * factor) for n, r in rates.items()}
        rates = {"exact": scaled(self.exact), "hop": scaled(self.hop)}
        return dataclasses.replace(self, name=f"{gb_s:g}GB/s", kind="given", kernel={}, **rates)

    def without_kernels(self) -> Link:
        return dataclasses.replace(self, kernel={})


def exact_over_nvlink(ranks: int, nbytes: float) -> float:
    """Seconds of an exact all-reduce over H200's NVLink."""
    rates = {int(n): Rate(r["us"], r["gb_s"]) for n, r in load()["links"]["nvlink"]["exact"].items()}
    return Link("nvlink", "nvlink", rates, {}).all_reduce(ranks, nbytes)


def _nearest(by_ranks: dict[int, Any], ranks: int) -> tuple[int, Any]:
    at = min(by_ranks, key=lambda n: (abs(math.log(n / max(ranks, 1))), n))
    return at, by_ranks[at]


def steps(ranks: int) -> int:
    """Messages that follow each other in an exact all-reduce: in a ring, or in a tree where that has fewer."""
    return 2 * min(ranks - 1, max(1, math.ceil(math.log2(ranks))))


def hop_steps(ranks: int) -> float:
    """The same of a hop of a compressed sum, the mean of both: all exchange at once, then each result goes round."""
    return (1 + steps(ranks) / 2) / 2


def parse(text: str, gpu: Gpu, measured: dict | None = None, key: str = "--link") -> Link:
    """The link that a text names.

    Raises:
      ConfigError: no such link, a speed or latency that cannot be, NVLink on a GPU that has none.
    """
    if text in ("nvlink", "host"):
        return _fitted(text, gpu, key)
    if text == "nvls":
        return _nvls(gpu, key)
    if text == "measured":
        return _measured(measured, key)
    if match := re.fullmatch(r"pcie([3-6])x(1|2|4|8|16)", text):
        return _pcie(int(match[1]), int(match[2]))
    found = _speed(text)
    if found is None:
        names = ("nvlink", "nvls", "host", "measured", "pcie3x16", "pcie4x16", "pcie5x16")
        if re.match(r"[-+.\d]", text):
            raise ConfigError(f"{key} {text!r}: is no speed: a number, then {UNITS}, such as 12GB/s,15us or 100Gb/s")
        hint = did_you_mean(text, names, otherwise="")
        raise ConfigError(f"{key} {text!r}: is no link; {hint}{' ' * bool(hint)}give a speed, or a name: {EXAMPLES}")
    return given(text, *found, key)


def between(text: str) -> Link:
    """Returns the link between hosts, of which a speed is known and no name.

    Raises:
      ConfigError: as `parse`.
    """
    found = _speed(text)
    if found is None:
        raise ConfigError(f"--between {text!r}: must be a speed in {UNITS}, such as 100Gb/s or 100Gb/s,10us")
    return given(text, *found, "--between")


def _speed(text: str) -> tuple[float, float | None] | None:
    """Returns (GB/s, latency in us if there is one) of a text; None for one that is no speed."""
    number = r"(\d+(?:\.\d+)?(?:e\d+)?)"
    match = re.fullmatch(rf"{number}\s*([MGT])(B|b)(?:/s|ps)?(?:,\s*{number}\s*(ns|us|ms))?", text)
    if match is None:
        return None
    speed = float(match[1]) * {"M": 1e-3, "G": 1, "T": 1e3}[match[2]] / {"B": 1, "b": 8}[match[3]]
    return speed, None if match[4] is None else float(match[4]) * {"ns": 1e-3, "us": 1, "ms": 1e3}[match[5]]


def given(name: str, gb_s: float, us: float | None = None, key: str = "--link") -> Link:
    """A link of a speed, 1e9 bytes a second from one GPU in one direction, and a latency.

    Raises:
      ConfigError: they are out of range.
    """
    if not 1e-3 <= gb_s <= MOST_GB_S:
        raise ConfigError(f"{key} {name!r}: a speed must be from 1MB/s to {MOST_GB_S:g}GB/s, such as 12GB/s or 100Gb/s")
    if us is not None and not 0 <= us <= 1e5:
        raise ConfigError(f"{key} {name!r}: a latency must be from 0us to 100ms, such as 15us")
    assumed = () if us is not None else ("the link's latency: that of host memory on H200",)
    c = load()["links"]
    us = c["host"]["exact"]["2"]["us"] / 2 if us is None else us
    # One message's latency: a ring of two has two steps.
    hop = Rate(us + c["start_us"], gb_s)
    return Link(name, "given", {2: Rate(2 * us, gb_s)}, {2: hop}, source="as given", assumed=assumed)


def _fitted(kind: str, gpu: Gpu, key: str) -> Link:
    c = load()["links"][kind]
    factor, assumed = 1.0, ()
    if kind == "nvlink":
        if not gpu.nvlink_gb_s:
            raise ConfigError(
                f"{key} nvlink: {gpu.name} has no NVLink, as far as its data sheet is known here; use {key} pcie4x16, "
                f"host, or a speed such as 12GB/s,15us"
            )
        factor = gpu.nvlink_gb_s / load()["nvlink_gb_s"]
        if factor != 1:
            assumed = (f"NVLink of {gpu.name}: as much of its nominal rate as H200 reached",)
    rates = lambda of: {int(n): Rate(r["us"], r["gb_s"] * factor) for n, r in of.items()}
    kernels = {}
    if kind == "nvlink" and gpu.capability is not None and gpu.capability[0] == 9:
        kernels = {int(n): Kernel(r["us"], r["gb_s"] * factor, r["ns"]) for n, r in c["kernel"].items()}
    of = {"exact": rates(c["exact"]), "hop": rates(c["hop"]), "kernel": kernels}
    return Link(kind, kind, source=c["source"], assumed=assumed, **of)


def _nvls(gpu: Gpu, key: str) -> Link:
    """NVLink whose exact sums are as fast as published with NVLS; everything else as measured."""
    if gpu.capability is None or gpu.capability[0] < 9:
        raise ConfigError(f"{key} nvls: {gpu.name} has no sums in NVSwitches, which Hopper brought; use {key} nvlink")
    link = _fitted("nvlink", gpu, key)
    factor = gpu.nvlink_gb_s / load()["nvlink_gb_s"]

    def us(ranks: int) -> float:
        at, rate = _nearest(link.exact, ranks)
        return rate.us * steps(ranks) / steps(at)

    exact = {ranks: Rate(us(ranks), gb_s * factor) for ranks, gb_s in NVLS_GB_S.items()}
    assumed = "exact sums, scatters and gathers at the bus bandwidth published for sums with NVLS; not measured here"
    return dataclasses.replace(link, name="nvls", exact=exact, assumed=(*link.assumed, assumed),
                               source=f"{link.source}; exact sums: NVIDIA/nccl issue 1455")  # fmt: skip


def _pcie(generation: int, lanes: int) -> Link:
    gb_s = PCIE_GT_S[generation] * PCIE_ENCODING * lanes / 8 * PCIE_PAYLOAD
    host = load()["links"]["host"]
    exact, hop = host["exact"]["2"]["us"], host["hop"]["2"]["us"]
    name = f"pcie{generation}x{lanes}"
    assumed = (f"{name}: what its packets carry at most, latencies of host memory; --measure says what it really is",)
    return Link(name, "pcie", {2: Rate(exact, gb_s)}, {2: Rate(hop, gb_s)}, source="PCI Express 128b/130b, packets of "
                "256 bytes", assumed=assumed)  # fmt: skip


def _measured(measured: dict | None, key: str) -> Link:
    if measured is None or not measured.get("link"):
        raise ConfigError(
            f"{key} measured: nothing has been measured on this machine; run python -m taco_jax.advise --measure there "
            f"with two devices or more (--measured FILE names another file)"
        )
    link, n = measured["link"], int(measured["ranks"])
    exact = Rate(link["exact"]["us"], link["exact"]["gb_s"])
    hop = Rate(link["hop"]["us"], link["hop"]["gb_s"])
    kernel = {n: Kernel(**link["kernel"])} if link.get("kernel") else {}
    return Link("measured", "measured", {n: exact}, {n: hop}, kernel, source=f"measured on {measured['hardware']}")
