"""Times of work and of messages on a machine: a GPU, its link, its hosts.

    product     start + waves(tiles over multiprocessors) x a tile's time, of the tile and split of k that take least
    attention   start + FLOPs / rate + pairs x the time of a pair's exponential
    memory      start of each kernel + bytes / bandwidth of the fastest copy
    codec       bytes read and written / GB/s of that codec's kernel
    message     latency + bytes / GB/s, hop by hop, inside a host and between hosts

docs/forecast.md explains each; constants are those of `constants.json`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from typing import Any

from taco_jax.codec import CODECS, Codec
from taco_jax.compression import tuned
from taco_jax.errors import ConfigError
from taco_jax.forecast.constants import load
from taco_jax.forecast.hardware import Gpu
from taco_jax.forecast.links import Link, Rate, steps
from taco_jax.forecast.messages import SiteMessage
from taco_jax.forecast.work import Work

NVLINK_RANKS = (2, 4, 8)


def limited(activity: float, power: dict[str, list[float]]) -> float:
    """How many times as long products take at an activity: on lines between the measured points."""
    points = list(zip(power["activity"], power["slower"]))
    for (x, y), (x2, y2) in itertools.pairwise(points):
        if activity < x2:
            return y + (y2 - y) * max(0.0, activity - x) / (x2 - x)
    return points[-1][1]


@functools.lru_cache(maxsize=1 << 16)
def _product(m: int, n: int, k: int, *, out: int, per_flop: float, bandwidth: float, sms: int) -> float:
    """Seconds of a product after its start: of the tile and the split that take least, or of its memory traffic."""
    c = load()["product"]
    moved = (2 * (m * k + k * n) + out * m * n) / bandwidth
    least = math.inf
    for (tile_m, tile_n), split in itertools.product(c["tiles"], c["splits"]):
        waves = math.ceil(math.ceil(m / tile_m) * math.ceil(n / tile_n) * split / sms)
        steps_of_k = math.ceil(k / split)
        # k0: what a tile begins and ends with, as steps of k. load: FLOPs' worth of each value that a step brings; a
        # small tile brings more for each of its FLOPs.
        flops = 2 * tile_m * tile_n * (steps_of_k + c["k0"]) + c["load"] * steps_of_k * (tile_m + tile_n)
        # Parts of a split k are added up in memory, in float32.
        parts = 2 * 4 * split * m * n / bandwidth if split > 1 else 0.0
        least = min(least, waves * flops * per_flop + parts)
    return 1e-6 * c["start_us"] + max(moved, least + c["memory"] * moved)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that it all runs on.

    devices: in all. hosts: equally many devices each. between: what one network card of a host carries; rails: cards
    of a host, a GPU sends by one of them. kernels: mosaic, triton or jnp. measured: what `--measure` found, else None.
    """

    gpu: Gpu
    link: Link
    devices: int = 1
    hosts: int = 1
    between: Link | None = None
    rails: int = 1
    kernels: str = ""
    measured: dict[str, Any] | None = None

    def __post_init__(self):
        if self.devices % self.hosts:
            raise ConfigError(f"--hosts {self.hosts}: must divide the {self.devices} devices (dp x pp x tp)")
        if self.hosts > 1 and self.between is None:
            raise ConfigError(f"--hosts {self.hosts}: say what joins them, --between 100Gb/s")
        if not self.kernels:
            object.__setattr__(self, "kernels", self.gpu.kernels)

    @property
    def per_host(self) -> int:
        return self.devices // self.hosts

    # Work

    @property
    def bandwidth(self) -> float:
        """Bytes a second of its memory, of what it reads and writes."""
        if self.measured and self.measured.get("copy_gb_s"):
            return self.measured["copy_gb_s"] * 1e9
        shares = load()["memory"]["share_of_sheet"]
        return self.gpu.memory_gb_s * 1e9 * shares.get(self.gpu.name, statistics.mean(shares.values()))

    @property
    def flops(self) -> float:
        """FLOP/s of large products of bf16, without the start of a tile and what it loads."""
        share = load()["product"]["share_of_peak"]
        if self.measured and self.measured.get("product_share"):
            share = self.measured["product_share"]
        return share * self.gpu.flops

    def seconds(self, work: Work, *, float32: bool = False) -> float:
        """Seconds of a piece of work, all its repetitions."""
        slower = self.gpu.flops / self.gpu.flops_f32 if float32 else 1.0
        if work.kind == "sum":
            c = load()["sum"]
            rate = c["share_of_copy"] * self.bandwidth
            return work.count * (work.kernels * 1e-6 * c["us"] + work.bytes / rate)
        if work.kind == "zeros":
            rate = load()["zeros"]["share_of_copy"] * self.bandwidth
            return work.count * (work.kernels * self.start + work.bytes / rate)
        if work.kind == "gelu":
            # Arithmetic goes with clock and multiprocessors, of which the peak is the measure.
            ps = load()["gelu"]["ps_per_value"] * load()["product"]["peak"] / self.gpu.flops
            seconds = max(work.bytes / self.bandwidth, 1e-12 * ps * work.values)
            return work.count * (work.kernels * self.start + seconds)
        if work.kind == "memory":
            return work.count * (work.kernels * self.start + work.bytes / self.bandwidth)
        if work.kind == "attention":
            c = load()["attention"]["backward" if work.stage == "dx" else "forward"]
            # Exponentials are not the tensor cores' work, but go with clock and multiprocessors as they do.
            faster = load()["product"]["peak"] / self.gpu.flops * slower
            work_s = faster * 1e-12 * (c["ps_per_flop"] * work.flops + c["ps_per_pair"] * work.pairs)
            return work.count * (self.start + 1e-6 * c["us"] + work_s)
        return work.count * self.product(work.m, work.n, work.k, out=work.out, slower=slower)

    @property
    def start(self) -> float:
        """Seconds from the end of one kernel's work to the start of the next one's."""
        if self.measured and self.measured.get("start_us"):
            return self.measured["start_us"] * 1e-6
        return load()["start"]["us"] * 1e-6

    @property
    def beside(self) -> float:
        """How much longer work beside a message of NCCL's takes, as a share of the message's time."""
        return load()["beside"]["longer" if self.link.is_nvlink else "over_host"]

    @property
    def host(self) -> float:
        """Seconds from arrays of the host to a program's start, and from its end to a result on the host."""
        if self.measured and self.measured.get("host_us"):
            return self.measured["host_us"] * 1e-6
        return load()["start"]["host_us"] * 1e-6

    def limit_of_power(self, flops: float, seconds: float) -> float:
        """How many times as long products take in a program of so many FLOPs and seconds, for the clocks' sake."""
        return limited(flops / (seconds * self.gpu.flops), load()["power"])

    def slowest(self, gpus: int) -> float:
        """How many times as long products take where so many GPUs wait for each other at every message.

        The largest of n normal values lies at Blom's quantile; what two GPUs showed fixes the spread.
        """
        largest = lambda n: statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
        return 1 + load()["slowest"]["longer"] * largest(gpus) / largest(2)

    def product(self, m: int, n: int, k: int, *, out: int = 2, slower: float = 1.0) -> float:
        """Seconds of [m, k] @ [k, n] in bfloat16 to values of `out` bytes."""
        return self.start + _product(
            m, n, k, out=out, per_flop=slower * self.gpu.sms / self.flops, bandwidth=self.bandwidth, sms=self.gpu.sms
        )

    # Codecs

    def codec_rate(self, codec: Codec, operation: str) -> float:
        """Bytes a second that encode, decode or reduce reads and writes; as a share of the memory's on cards that were
        not measured."""
        cards, (name, kind) = load()["codec"]["gb_s"], _like(codec, self.kernels)
        if self.measured and self.measured.get("codec_share"):
            return self.measured["codec_share"] * self.bandwidth * _against(cards, name, kind, operation)
        if self.gpu.name in cards:
            return 1e9 * cards[self.gpu.name][name][kind][operation]
        shares = load()["memory"]["share_of_sheet"]
        sheets = load()["memory"]["sheet_gb_s"]
        if kind == "jnp":
            # Bound by instructions where it rotates, by memory else: the slower of both scalings.
            scale = lambda card: min(self.gpu.flops / load()["product"]["peak"], self.gpu.memory_gb_s / sheets[card])
            return statistics.mean(1e9 * cards[card][name][kind][operation] * scale(card) for card in cards)
        share = statistics.mean(cards[card][name][kind][operation] / (shares[card] * sheets[card]) for card in cards)
        return share * self.bandwidth

    def codec_seconds(self, message: SiteMessage, codec: Codec, ranks: int) -> float:
        """Seconds of the codec's kernels of one message among `ranks`."""
        n = message.elements
        values, wire = message.nbytes, wire_bytes(codec, message)
        rate = lambda operation: self.codec_rate(codec, operation)
        encode, decode = (values + wire) / rate("encode"), (values + wire) / rate("decode")
        if message.op == "ppermute":
            return encode + decode
        if message.op == "all_gather":
            return encode / ranks + decode
        # The own term, unquantised, beside what the others sent.
        added = (wire + 2 * values / ranks) / rate("reduce")
        if message.op == "psum_scatter":
            return encode + added
        if ranks == 2:
            seconds = encode + (2 * values + wire) / rate("decode")
        else:
            seconds = encode + (wire + wire / ranks) / rate("reduce") + decode
        return seconds + (self.feedback_seconds(n) if message.feedback else 0.0)

    def decoding_seconds(self, message: SiteMessage, ranks: int) -> float:
        """Seconds of the part of `codec_seconds` that comes after a sum's last hop."""
        values, wire = message.nbytes, wire_bytes(message.codec, message)
        return ((2 if ranks == 2 else 1) * values + wire) / self.codec_rate(message.codec, "decode")

    def feedback_seconds(self, elements: int) -> float:
        c = load()["feedback"]
        return 1e-6 * c["us"] + c["bytes_per_element"] * elements / self.bandwidth

    # Messages

    def least_bytes(self, link: Link, ranks: int, given: int | None, nvlink: bool) -> int:
        """The size from which a message goes compressed: as given, else what `taco_jax.compression.tuned` takes where
        nothing was tuned."""
        if given is not None:
            return given
        if link.kind != "nvlink" and not link.kernel:
            return tuned.DEFAULT_MIN_BYTES
        return tuned.NVLINK_MIN_BYTES if self.one_kernel(link, ranks, nvlink) else tuned.SEPARATE_MIN_BYTES

    def one_kernel(self, link: Link, ranks: int, nvlink: bool) -> bool:
        return nvlink and bool(link.kernel) and ranks in NVLINK_RANKS and self.kernels == "mosaic"

    def spread(self, axis: str, sizes: dict[str, int]) -> tuple[int, int]:
        """(ranks of an axis on one host, hosts that it spans); the mesh is dp x pp x tp, tp innermost."""
        stride = {"tp": 1, "pp": sizes["tp"], "dp": sizes["tp"] * sizes["pp"]}[axis]
        local = min(sizes[axis], max(1, self.per_host // stride))
        if sizes[axis] % local:
            local = math.gcd(sizes[axis], local)
        return local, sizes[axis] // local

    def rail(self, senders: int) -> float:
        """Bytes a second of each of `senders` GPUs of a host that send to other hosts at once."""
        card = self.between.gb_s(2) * 1e9
        return min(card, card * self.rails / senders)

    def _between(self, hops: float, sent: float) -> float:
        """Seconds between hosts of `sent` bytes from each GPU of a host, all at once."""
        return 1e-6 * hops * _hop(self.between).us + sent / self.rail(self.per_host)

    def exact_seconds(self, message: SiteMessage, local: int, hosts: int) -> float:
        """Seconds of one exact message among local x hosts ranks."""
        ranks, b = local * hosts, message.nbytes
        if message.op == "ppermute":
            return self.link.send(2, b) if hosts == 1 else self._between(1, b)
        if hosts == 1:
            whole = self.link.all_reduce(ranks, b)
        else:
            inside = self.link.all_reduce(local, b) if local > 1 else 0.0
            # NCCL's rings go by all cards of a host: each rank carries its part of what the host sends.
            outside = self._between(steps(hosts), 2 * (hosts - 1) / hosts * b / local)
            # A ring's steps follow each other in a pipeline; the slower part of the way is its speed.
            whole = max(inside, outside)
        return whole if message.op == "psum" else whole / 2

    def copy_seconds(self, message: SiteMessage) -> float:
        """Seconds in which copy engines bring a sum's wires, each GPU's to the other, over NVLink."""
        c, faster = load()["copy"], self.link.gb_s(2) / load()["links"]["nvlink"]["hop"]["2"]["gb_s"]
        return 1e-6 * c["us"] + wire_bytes(message.codec, message) / (1e9 * c["gb_s"] * faster)

    def compressed_seconds(self, message: SiteMessage, local: int, hosts: int) -> tuple[float, float]:
        """(codec, wire) seconds of one compressed message that is no single kernel."""
        ranks, codec = local * hosts, message.codec
        wire = wire_bytes(codec, message)
        if message.op == "ppermute":
            sent = self.link.send(2, wire) if hosts == 1 else self._between(1, wire)
            return self.codec_seconds(message, codec, ranks), sent
        hops = {"psum": 2, "psum_scatter": 1, "all_gather": 1}[message.op]
        if hosts == 1:
            seconds = self.codec_seconds(message, codec, ranks)
            if ranks == 2 and message.op == "psum":
                return seconds, self.link.send(2, wire)
            return seconds, hops * self.link.send(ranks, (ranks - 1) / ranks * wire)
        outer = message.between or codec
        coarse = wire_bytes(outer, message)
        if local == 1 or message.nbytes < tuned.HIERARCHICAL_MIN_BYTES:
            of, w = (outer, coarse) if local == 1 else (codec, wire)
            # Flat: every rank sends to all others.
            crossing = hops * (ranks - local) / ranks * w
            return self.codec_seconds(message, of, ranks), self._between(hops, crossing)
        part = dataclasses.replace(message, elements=math.ceil(message.elements / local), feedback=False)
        inside = hops * self.link.send(local, (local - 1) / local * wire)
        exchange = hosts == 2 and message.op == "psum"
        share = coarse / local
        outside = self._between(1, share) if exchange else self._between(hops, hops * (hosts - 1) / hosts * share)
        codecs = self.codec_seconds(message, codec, max(local, 3)) + self.codec_seconds(part, outer, hosts)
        return codecs, inside + outside


def _hop(link: Link) -> Rate:
    return link.hop[min(link.hop)]


def wire_bytes(codec: Codec, message: SiteMessage) -> int:
    """Bytes of a message's values in a codec."""
    if codec.per_token:
        codec = codec.of((message.elements // (message.per_token or 128), message.per_token or 128))
    return codec.wire_bytes(message.elements)


def _against(cards: dict, name: str, kind: str, operation: str) -> float:
    """A codec's rate as a share of int8h's encoding, the kernel that `--measure` takes."""
    return statistics.mean(c[name][kind][operation] / c["int8h"][kind]["encode"] for c in cards.values())


def _like(codec: Codec, kernels: str) -> tuple[str, str]:
    """(preset, mosaic or jnp) whose measured rates stand for a codec's: of the same element and rotation if there is
    one, else of as many bits."""
    known = load()["codec"]["gb_s"]["H200"]
    rotated = codec.rotation != "none"
    bits = 4 if codec.mixed else int(codec.bits if not codec.per_token else 8)

    def distance(name: str) -> tuple:
        other = CODECS[name]
        return (other != codec, other.element != codec.element, (other.rotation != "none") != rotated,
                abs(other.bits - bits), other.scale != codec.scale)  # fmt: skip

    without = codec.mixed or codec.per_token or codec.scale in ("paper", "e5m0", "e4m0")
    return min(known, key=distance), "jnp" if without or kernels == "jnp" else "mosaic"
