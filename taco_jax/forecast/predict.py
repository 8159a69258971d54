"""The time of a training step, and the time to the first token, on a machine, in one way of sending.

A backward message of a column-parallel layer needs nothing of the products that make weight gradients, nor of sums for
biases: XLA sends it beside these, and what they take longer costs nothing. The forward message of the attention goes
beside casts of the mlp's weights. Codec kernels, other forward messages and sums in one kernel over NVLink are waited
for. With chains one chain's messages go beside the others' work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from taco_jax.codec import AUTO, as_codec
from taco_jax.collectives.comm_log import share_sent
from taco_jax.config import TrainConfig, microbatch, pipeline_schedule, remat, sequence_parallel, with_compression
from taco_jax.config.checks import check
from taco_jax.errors import ConfigError
from taco_jax.forecast import links, messages, work
from taco_jax.forecast.cost import Machine, wire_bytes
from taco_jax.forecast.messages import SiteMessage
from taco_jax.forecast.work import Shard, Work
from taco_jax.inference.settings import EIGHT_BITS
from taco_jax.models.config import ModelConfig, validate

LAYERS = "layers/"


@dataclasses.dataclass
class Part:
    """Seconds of one site: products (attention with them), memory traffic, codec kernels, messages that are waited for,
    and what goes on beside products (hidden), which is not in the time."""

    products: float = 0.0
    memory: float = 0.0
    codec: float = 0.0
    messages: float = 0.0
    hidden: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.memory + self.codec + self.messages

    def plus(self, other: Part, factor: float = 1.0) -> None:
        for field in dataclasses.fields(Part):
            value = getattr(self, field.name) + factor * getattr(other, field.name)
            setattr(self, field.name, value)


@dataclasses.dataclass
class Forecast:
    """One way of sending. codecs: as given, none for exact, free for nothing sent. bubble: seconds in which a stage has
    nothing to do. sent, bf16: bytes that one device sends. exactly: sites that go exactly for their size."""

    codecs: str
    sites: dict[str, Part]
    bubble: float = 0.0
    sent: float = 0.0
    bf16: float = 0.0
    exactly: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.bubble + sum(part.seconds for part in self.sites.values())

    def total(self, field: str) -> float:
        return sum(getattr(part, field) for part in self.sites.values())

    @property
    def ratio(self) -> float:
        """Times fewer bytes than as bf16."""
        return self.bf16 / self.sent if self.sent else 1.0


class Timer:
    """Adds up work and messages by site. float32: products are without tensor cores' 16-bit types."""

    def __init__(self, machine: Machine, sizes: dict[str, int], *, float32: bool = False, min_bytes: int | None = None,
                 nvlink: bool = True, chains: int = 1):  # fmt: skip
        self.machine, self.sizes, self.float32 = machine, sizes, float32
        self.min_bytes, self.nvlink, self.chains = min_bytes, nvlink, chains
        self.parts: dict[str, Part] = {}
        self.beside = {"forward": 0.0, "backward": 0.0}
        self.sent = self.bf16 = self.flops = 0.0
        self.exactly: list[str] = []

    def empty(self) -> Timer:
        """Returns a timer of the same machine that has added up nothing."""
        options = {"float32": self.float32, "min_bytes": self.min_bytes, "nvlink": self.nvlink, "chains": self.chains}
        return Timer(self.machine, self.sizes, **options)

    def part(self, site: str) -> Part:
        return self.parts.setdefault(site, Part())

    def work(self, items: Iterable[Work], times: float = 1.0) -> None:
        for item in items:
            seconds = self.machine.seconds(item, float32=self.float32) * times
            part = self.part(item.site)
            self.flops += times * (item.flops + 2.0 * item.count * item.m * item.n * item.k)
            if item.kind not in ("product", "attention"):
                part.memory += seconds
            else:
                part.products += seconds
            if item.beside:
                self.beside[item.beside] += seconds

    def messages(self, items: Sequence[SiteMessage]) -> None:
        """Adds messages; work must have been added before, for what goes on beside it."""
        for message in items:
            self._message(message)

    def _message(self, message: SiteMessage) -> None:
        local, hosts = self.machine.spread(message.axis, self.sizes)
        link, ranks, part = self.machine.link, message.ranks, self.part(message.site)
        if not message.codec.exact and message.axis == "tp":
            least = self.machine.least_bytes(link, ranks, self.min_bytes, self.nvlink and hosts == 1)
            if message.nbytes < least:
                self.exactly.append(message.site)
                message = dataclasses.replace(message, codec=messages.EXACT, feedback=False)
        share = share_sent(message.op, ranks) * message.calls
        self.bf16 += share * 2 * message.elements
        codec = message.codec
        wire = message.nbytes if codec.exact else wire_bytes(codec, message)
        self.sent += share * wire
        if codec.exact:
            self._send(part, message, self.machine.exact_seconds(message, local, hosts))
            return
        one = self.machine.one_kernel(link, ranks, self.nvlink) and hosts == 1 and message.axis == "tp"
        if one and not message.feedback and message.op in ("psum", "psum_scatter", "all_gather"):
            at = min(link.kernel, key=lambda n: abs(n - ranks))
            sent = share_sent(message.op, ranks) * wire
            part.messages += message.calls * link.kernel[at].seconds(sent, message.elements)
            return
        codec_s, wire_s = self.machine.compressed_seconds(message, local, hosts)
        if message.buckets > 1:
            # Buckets depend on nothing of each other: one is encoded while another is on its way.
            beside = min(codec_s, wire_s) * (1 - 1 / message.buckets)
            part.codec += message.calls * (codec_s - beside)
            part.hidden += message.calls * beside
            part.messages += message.calls * wire_s
            return
        part.codec += message.calls * codec_s
        self._send(part, message, wire_s)

    def _send(self, part: Part, message: SiteMessage, seconds: float) -> None:
        total = message.calls * seconds
        early = {"forward": (work.OUT,), "backward": (work.QKV, work.UP)}[message.direction]
        # XLA puts as much beside a message as it would take over NVLink, whatever the link.
        believed = message.calls * links.exact_over_nvlink(message.ranks, message.nbytes)
        hidden = min(total, believed, self.beside[message.direction]) if message.site in early else 0.0
        self.beside[message.direction] -= hidden
        if self.machine.link.is_nvlink:
            # NCCL takes multiprocessors and memory from what goes beside it.
            total += self.machine.beside * hidden
        part.hidden += hidden
        part.messages += total - hidden

    def forecast(self, codecs: str, bubble: float = 0.0) -> Forecast:
        """Returns what was added up, at the clocks that so much multiplication leaves, on the slowest GPU."""
        bubble = self._slow_down(self.machine.slowest(self.sizes["tp"] * self.sizes["pp"]), bubble)
        seconds = bubble + sum(part.seconds for part in self.parts.values())
        if not self.float32 and seconds:
            bubble = self._slow_down(self.machine.limit_of_power(self.flops, seconds), bubble)
        exactly = tuple(dict.fromkeys(self.exactly))
        return Forecast(codecs, self.parts, bubble, sent=self.sent, bf16=self.bf16, exactly=exactly)

    def _slow_down(self, times: float, bubble: float) -> float:
        """Makes products so many times as long; returns the bubble, which grows as all does."""
        before = sum(part.seconds for part in self.parts.values())
        for part in self.parts.values():
            part.products *= times
        return bubble * sum(part.seconds for part in self.parts.values()) / before if before else bubble

    def chained(self) -> None:
        """Layers in chains: the shorter of work and messages is seen for one chain alone."""
        parts = [part for site, part in self.parts.items() if site.startswith(LAYERS)]
        compute = sum(p.products + p.memory + p.codec for p in parts)
        sending = sum(p.messages for p in parts)
        if self.chains == 1 or not sending:
            return
        seen = max(compute, sending) + min(compute, sending) / self.chains - compute
        for part in parts:
            left = part.messages * min(1.0, seen / sending)
            part.hidden += part.messages - left
            part.messages = left


def step(config: TrainConfig, machine: Machine, codecs: str | None = None) -> Forecast:
    """The forecast of a training step in the codecs FORWARD[:BACKWARD], of the configuration's own where None.

    codecs: none makes every axis exact; free sends nothing.

    Raises:
      ConfigError: the configuration cannot be.
    """
    name = codecs or f"{config.compression.forward}:{config.compression.backward}"
    free = name == "free"
    if codecs is not None:
        config = with_compression(config, "none" if free else codecs)
    config = check(config)
    if config.chains == AUTO:  # what is recorded of one chain is what times were fitted to
        config = dataclasses.replace(config, chains=1)
    model, mesh, schedule = config.model, config.mesh, pipeline_schedule(config)
    shard, float32 = Shard(model, mesh.tp), config.compute_dtype == "float32"
    size, length = 4 if float32 else 2, config.data.sequence_length
    fused = fused_attention(machine, model, config.attention_implementation, float32)
    sp = mesh.tp if sequence_parallel(config)[0] else 1
    sizes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp}
    timer = Timer(machine, sizes, float32=float32, min_bytes=config.compression.min_bytes,
                  nvlink=config.compression.link != "nccl" and mesh.pp == 1, chains=config.chains)  # fmt: skip

    sequences = microbatch(config) // config.chains
    shape = {"fused_attention": fused, "size": size, "sp": sp}
    mode, _ = remat(config)
    in_ticks = schedule is not None and schedule.kind == "1f1b"
    # 1F1B keeps nothing of a layer but its input, and runs it again with its gradients.
    first_pass = work.layer_forward(shard, sequences, length, remat="inference" if in_ticks else mode, **shape)
    layer = list(first_pass)
    if mode != "none":
        again = work.layer_forward(shard, sequences, length, "again", sums=False, **shape)
        layer += again if mode == "full" else [w for w in again if w.kind != "product"]
    if in_ticks:
        layer += work.layer_forward(shard, sequences, length, remat=mode, **shape)
    layer += work.layer_backward(shard, sequences, length, remat=mode, **shape)
    # gpipe and circular write what the ticks keep in its place.
    several = work.COPIED if in_ticks or config.accumulation > 1 else 1
    layer += work.kept(shard, sequences * length, mode, several, size=size, sp=sp)
    layer += work.layer_weights(shard, mode, size)
    layers = model.n_layers // mesh.pp
    microbatches = 1 if schedule is None else schedule.microbatches
    calls = layers * config.chains * microbatches * config.accumulation
    timer.work(layer, calls)
    at_the_ends = microbatches if in_ticks else 1
    tokens = microbatch(config) * microbatches * length // at_the_ends
    shares = 1
    if schedule is not None and schedule.shares_head(tokens // length, model.vocab_size, mesh.tp):
        shares = schedule.stages
    timer.work(work.head_loss(shard, tokens // shares, config.loss_chunk, size), at_the_ends * config.accumulation)
    timer.work(work.embed(shard, tokens, size), at_the_ends * config.accumulation)
    parameters = shard.parameters(layers)
    # Before the optimizer: its memory traffic is in no tick.
    sent = [] if free else messages.training(config)
    if not free:
        timer.messages(sent)
        timer.chained()
    bubble = _bubble(timer, schedule, _forward_pass(timer, first_pass, calls, sent) if in_ticks else 0.0)
    zero1 = mesh.dp if config.data_parallel.zero1 else 1
    timer.work(work.optimizer(parameters, zero1) + work.accumulate(parameters, config.accumulation))
    return timer.forecast(name, bubble)


def _forward_pass(timer: Timer, layer: Sequence[Work], calls: int, sent: Sequence[SiteMessage]) -> float:
    """Seconds of the first of 1F1B's two forward passes, its messages with it."""
    alone = timer.empty()
    alone.work(layer, calls)
    # The table counts forward messages of layers twice.
    mine = (m for m in sent if m.direction == "forward" and m.site.startswith(LAYERS))
    alone.messages([dataclasses.replace(m, calls=m.calls / 2) for m in mine])
    return sum(part.seconds for part in alone.parts.values())


def _bubble(timer: Timer, schedule, forward: float = 0.0) -> float:
    """Seconds of empty ticks. Messages of layers are counted in all ticks of GPipe: those of empty ones go here.

    forward: seconds of the forward passes of 1F1B's layers, of all microbatches.
    """
    if schedule is None:
        return 0.0
    if schedule.kind == "1f1b":
        return _bubble_of_1f1b(timer, schedule, forward)
    more = schedule.forward_ticks / (schedule.microbatches * schedule.chunks)
    in_ticks = [part for site, part in timer.parts.items() if site.startswith((LAYERS, "pp/act"))]
    for part in in_ticks:
        for field in ("messages", "codec", "hidden"):
            setattr(part, field, getattr(part, field) / more)
    return (more - 1) * sum(part.seconds for part in in_ticks)


def _bubble_of_1f1b(timer: Timer, schedule, forward: float) -> float:
    """Seconds of empty ticks, after the last stage's head and loss are put beside the other stages' forward passes.

    With F of a forward pass, B of a backward pass (its recomputation in it) and H of the head, S stages and m >= 2
    microbatches: S - 1 ticks take F, one B + H, m - 2 B + max(F, H), one B + H, and S - 1 take B. Of m (F + B) that
    leaves (S - 1) (F + B) - 2 F empty, and the head is seen 2 H + (m - 2) max(0, H - F).
    """
    m, stages = schedule.microbatches, schedule.stages
    ends = [part for site, part in timer.parts.items() if site in ("head", "head/softmax")]
    layers = sum(part.seconds for site, part in timer.parts.items() if site.startswith((LAYERS, "pp/act", "embed")))
    head = sum(part.seconds for part in ends)
    if head:
        seen = (min(m, 2) * head + max(m - 2, 0) * max(0.0, head - forward)) / (m * head)
        for part in ends:
            part.hidden += (1 - seen) * part.seconds
            for field in ("products", "memory", "codec", "messages"):
                setattr(part, field, seen * getattr(part, field))
    return ((stages - 1) * layers - min(m, 2) * forward) / m


def first_token(model: ModelConfig, machine: Machine, codecs: str, *, tp: int, length: int, batch: int = 1,
                min_bytes: int | None = None, feedback: bool | None = None) -> Forecast:  # fmt: skip
    """The forecast of the time to the first token of `batch` prompts of `length` tokens, weights in bfloat16.

    feedback: sums take along what the one before lost; None: codecs below 8 bits do, unless one kernel sends them.
    """
    free = codecs == "free"
    codec = as_codec("none" if free else codecs.partition(":")[0])
    try:
        shard = Shard(validate(model, tp), tp)
    except ValueError as error:
        raise ConfigError(f"--mesh.tp {tp}: {error}") from None
    if length > model.max_length:
        raise ConfigError(f"--ttft {length}: the model's longest sequence has {model.max_length} tokens; use that")
    if feedback is None:
        one = machine.one_kernel(machine.link, tp, True) and machine.hosts == 1
        feedback = codec.element not in EIGHT_BITS and not one
    timer = Timer(machine, {"dp": 1, "pp": 1, "tp": tp}, min_bytes=min_bytes)
    fused = fused_attention(machine, model, None, False)
    layer = work.layer_forward(shard, batch, length, fused_attention=fused)
    # Caches are written.
    layer.append(Work(work.QKV, "forward", "memory", bytes=2 * 2 * 2 * batch * length * shard.kv))
    layer += work.prompt_weights(shard)
    timer.work(layer, model.n_layers)
    timer.work(work.embed(shard, batch * length, gradients=False))
    timer.work([Work("head", "forward", "product", m=batch, n=shard.v, k=shard.d)])
    timer.part("host").memory += machine.host
    if not free:
        timer.messages(messages.prompt(model, tp, batch, length, codec, feedback=feedback))
    return timer.forecast(codecs)


def fused_attention(machine: Machine, model: ModelConfig, implementation: str | None, float32: bool) -> bool:
    """Returns whether attention is cuDNN's, as `taco_jax.models.blocks.implementation` chooses."""
    capability = machine.gpu.capability
    fits = not float32 and model.head_dim % 8 == 0 and model.head_dim <= 128
    return implementation != "xla" and fits and (capability is None or capability >= (8, 0))


def tokens_of(config: TrainConfig) -> int:
    """Tokens of a step."""
    return config.global_batch * config.data.sequence_length


__all__ = ["Forecast", "Part", "first_token", "step", "tokens_of"]
