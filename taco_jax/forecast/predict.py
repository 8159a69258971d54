"""The time of a training step, and the time to the first token, on a machine, in one way of sending.

A backward message of a column-parallel layer needs nothing of the products that make weight gradients, nor of sums for
biases: XLA sends it beside these, and what they take longer costs nothing. The forward message of the attention goes
beside casts of the mlp's weights. Codec kernels, other forward messages and sums in one kernel over NVLink are waited
for. With chains one chain's messages go beside the others' work (`overlap`). Copy engines bring gradients' sums where
the trainer has them do so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from taco_jax.codec import AUTO, Codec, as_codec
from taco_jax.collectives.comm_log import share_sent
from taco_jax.compression import chains as rule
from taco_jax.compression import copies
from taco_jax.compression.compression import Compression
from taco_jax.config import (
    TrainConfig,
    auto_chains,
    microbatch,
    pipeline_schedule,
    remat,
    sequence_parallel,
    with_compression,
)
from taco_jax.config import overlap as gradients_overlap
from taco_jax.config.checks import check
from taco_jax.config.settings import site_compression
from taco_jax.errors import ConfigError
from taco_jax.forecast import links, messages, overlap, work
from taco_jax.forecast.cost import Machine, wire_bytes
from taco_jax.forecast.messages import SiteMessage
from taco_jax.forecast.overlap import Load, Step, Sums, Window
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
    nothing to do. sent, bf16: bytes that one device sends. exactly: sites that go exactly for their size. chains: parts
    of a batch that go through each layer side by side, and why; copied: which sums copy engines bring, and why."""

    codecs: str
    sites: dict[str, Part]
    bubble: float = 0.0
    sent: float = 0.0
    bf16: float = 0.0
    exactly: tuple[str, ...] = ()
    chains: int = 1
    chains_why: str = ""
    copied: str = ""

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
    """Adds up work and messages by site. float32: products are without tensor cores' 16-bit types.

    long_messages: XLA is told that messages take long. backward: what a layer's gradients go beside.
    """

    def __init__(self, machine: Machine, sizes: dict[str, int], *, float32: bool = False, min_bytes: int | None = None,
                 chains: int = 1, long_messages: bool = False):  # fmt: skip
        self.machine, self.sizes, self.float32 = machine, sizes, float32
        self.min_bytes, self.chains, self.long_messages = min_bytes, chains, long_messages
        self.backward = Load()
        self.parts: dict[str, Part] = {}
        self.beside = {"forward": 0.0, "backward": 0.0}
        self.products_beside = 0.0
        self.sums: dict[str, dict[str, Sums]] = {"forward": {}, "backward": {}}
        self.windows: list[Window] = []
        self.sent = self.bf16 = self.flops = 0.0
        self.exactly: list[str] = []

    def empty(self) -> Timer:
        """Returns a timer of the same machine that has added up nothing, and knows no chains."""
        options = {"float32": self.float32, "min_bytes": self.min_bytes, "long_messages": self.long_messages}
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
            if item.beside == "backward" and item.kind == "product":
                self.products_beside += seconds

    def messages(self, items: Sequence[SiteMessage]) -> None:
        """Adds messages; work must have been added before, for what goes on beside it."""
        for message in items:
            self._message(message)

    def _message(self, message: SiteMessage) -> None:
        local, hosts = self.machine.spread(message.axis, self.sizes)
        link, ranks, part = self.machine.link, message.ranks, self.part(message.site)
        if not message.codec.exact and message.axis == "tp":
            least = self.machine.least_bytes(link, ranks, self.min_bytes, message.link != "nccl" and hosts == 1)
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
        one = self.machine.one_kernel(link, ranks, message.link not in ("nccl", "copy")) and hosts == 1
        one = one and message.axis == "tp"
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
        hops = 1 if message.op != "psum" or ranks == 2 else 2
        if message.link == "copy" and link.is_nvlink:
            wire_s = self.machine.copy_seconds(message)
            self._send(part, message, wire_s, longer=0.0)
            return
        self._send(part, message, wire_s, hops=hops)

    def _send(self, part: Part, message: SiteMessage, seconds: float, *, hops: int = 1,
              longer: float | None = None) -> None:  # fmt: skip
        """Adds the time that a message is under way, in so many hops, and that of what is beside it.

        longer: how much longer that takes, as a share of the message's time; None: as beside a message of NCCL's.
        """
        longer = self.machine.beside if longer is None else longer
        if self.chains > 1 and message.axis == "tp" and message.site.startswith(LAYERS):
            after = 0.0 if message.codec.exact else self.machine.decoding_seconds(message, message.ranks)
            part.codec += message.calls * (overlap.DECODING_BESIDE - 1) * after
            after *= overlap.DECODING_BESIDE
            found = Sums((seconds / hops,) * hops, after, message.calls / self.chains, longer)
            self.sums[message.direction][message.site] = found
            return
        if message.site == messages.LAYER_GRADIENTS:
            # That of the layer whose backward pass is the last is beside nothing.
            for calls, beside in ((message.calls - 1, self.backward), (1, Load())):
                self.windows.append(Window(message.site, calls, seconds, beside, longer))
            return
        total = message.calls * seconds
        early = {"forward": (work.OUT,), "backward": (work.QKV, work.UP)}[message.direction]
        # XLA puts as much beside a message as it would take over NVLink, whatever the link.
        believed = message.calls * links.exact_over_nvlink(message.ranks, message.nbytes)
        believed = math.inf if self.long_messages else believed
        hidden = min(total, believed, self.beside[message.direction]) if message.site in early else 0.0
        self.beside[message.direction] -= hidden
        part.hidden += hidden
        part.messages += total - hidden + longer * hidden

    def forecast(self, codecs: str, bubble: float = 0.0) -> Forecast:
        """Returns what was added up, at the clocks that so much multiplication leaves, on the slowest GPU."""
        slower = self.machine.slowest(self.sizes["tp"] * self.sizes["pp"])
        bubble = self._slow_down(slower, bubble)
        seen = sum(messages for messages, _ in self._settled(slower).values())
        seconds = bubble + seen + sum(part.seconds for part in self.parts.values())
        if not self.float32 and seconds:
            limit = self.machine.limit_of_power(self.flops, seconds)
            bubble = self._slow_down(limit, bubble)
            slower *= limit
        self.settle(slower)
        exactly = tuple(dict.fromkeys(self.exactly))
        return Forecast(codecs, self.parts, bubble, sent=self.sent, bf16=self.bf16, exactly=exactly)

    def _slow_down(self, times: float, bubble: float) -> float:
        """Makes products so many times as long; returns the bubble, which grows as all does."""
        before = sum(part.seconds for part in self.parts.values())
        for part in self.parts.values():
            part.products *= times
        return bubble * sum(part.seconds for part in self.parts.values()) / before if before else bubble

    def chained(self, forward: Sequence[Step], backward: Sequence[Step] = (), *, alone: float, more: float) -> None:
        """Takes the windows of messages that were added, which go beside the chains' steps. alone, more: as of
        `overlap.windows`, in the forward pass."""
        sums, self.sums = self.sums, {"forward": {}, "backward": {}}
        self.windows += overlap.windows(forward, sums["forward"], alone=alone, more=more)
        self.windows += overlap.windows(backward, sums["backward"], filled=True)

    def _settled(self, times: float) -> dict[str, tuple[float, float]]:
        spare = self.beside["backward"] + (times - 1) * self.products_beside
        return overlap.settled(self.windows, spare, times)

    def settle(self, times: float = 1.0) -> None:
        """Adds the messages of chains, products being `times` as long as alone."""
        for site, (messages_, hidden) in self._settled(times).items():
            part = self.part(site)
            part.messages += messages_
            part.hidden += hidden
        self.windows = []


def slow_link(link: links.Link) -> str | None:
    """Returns why a link is slow to the trainer; None where it is NVLink."""
    return None if link.is_nvlink else f"{link.name} is no NVLink"


def chains(config: TrainConfig, machine: Machine) -> tuple[int, str]:
    """Returns how many parts of a microbatch go through each layer side by side on a machine, and why: as
    `taco_jax.config.chains`, the machine's link in the place of the environment's."""
    if config.chains != AUTO:
        return config.chains, "as configured"
    if config.mesh.tp == 1:
        return 1, "tp is 1"
    least = _least_bytes(machine, config.mesh.tp, site_compression(config.compression))
    return auto_chains(config, slow_link(machine.link), least)


def _least_bytes(machine: Machine, tp: int, compression) -> int:
    """Returns the least bytes of a chain's message with which it pays, as `taco_jax.compression.chains` does."""
    if compression.is_exact:
        return rule.MIN_CHAIN_BYTES
    least = machine.least_bytes(machine.link, tp, compression.min_bytes, compression.link != "nccl")
    return max(rule.MIN_CHAIN_BYTES, least)


def why_not_copied(config: TrainConfig, machine: Machine) -> str | None:
    """Returns why the trainer copies no sums by itself on a machine, one process driving its GPUs; None where it
    does."""
    size = 4 if config.compute_dtype == "float32" else 2
    nbytes = microbatch(config) * config.data.sequence_length * config.model.d_model * size
    why = copies.why_other_mesh(config.mesh.tp, config.mesh.size) or copies.why_other_step(
        chains(config, machine)[0], sequence_parallel(config)[0], adapters=config.lora.rank is not None, nbytes=nbytes
    )
    if why is None and (machine.hosts > 1 or not machine.one_kernel(machine.link, 2, True)):
        return f"{machine.gpu.name} over {machine.link.name} sums in no kernel of ours"
    return why


def _copies(config: TrainConfig, machine: Machine) -> tuple[bool, str]:
    """Returns (whether gradients' sums are copied by themselves, which sums are, and why)."""
    c = config.compression
    if "copy" in (c.link, c.backward_link):
        return False, "sums (as configured)" if c.link == "copy" else "gradients' sums (as configured)"
    if why := why_not_copied(config, machine):
        return False, f"no sums ({why})"
    asked = site_compression(c)
    if c.plan or c.planned is not None:
        asked = dataclasses.replace(asked, forward="int8h", backward="int8h")
    if copies.with_copies(asked) == asked:
        return False, f"no sums ({'all go exactly' if asked.is_exact else 'as configured'})"
    return True, "gradients' sums, beside the products of their weights"


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
    # In more chains a step that sends nothing is slower: as a ceiling it has one.
    count, why = (1, "nothing is sent") if free and config.chains == AUTO else chains(config, machine)
    copied, which = (False, "") if free or config.mesh.tp == 1 else _copies(config, machine)
    config = dataclasses.replace(config, chains=count)
    model, mesh, schedule = config.model, config.mesh, pipeline_schedule(config)
    shard, float32 = Shard(model, mesh.tp), config.compute_dtype == "float32"
    size, length = 4 if float32 else 2, config.data.sequence_length
    fused = fused_attention(machine, model, config.attention_implementation, float32)
    sp = mesh.tp if sequence_parallel(config)[0] else 1
    sizes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp}
    by_layer = gradients_overlap(config)[0]
    told = by_layer or copied or "copy" in (config.compression.link, config.compression.backward_link)
    timer = Timer(machine, sizes, float32=float32, min_bytes=config.compression.min_bytes, chains=count,
                  long_messages=told)  # fmt: skip

    sequences = microbatch(config) // count
    shape = {"fused_attention": fused, "size": size, "sp": sp}
    mode, _ = remat(config)
    in_ticks = schedule is not None and schedule.kind == "1f1b"
    # 1F1B keeps nothing of a layer but its input, and runs it again with its gradients.
    first_pass = work.layer_forward(shard, sequences, length, remat="inference" if in_ticks else mode, **shape)
    first_pass = work.of_chains(first_pass, count)
    layer = list(first_pass)
    if mode != "none":
        again = work.layer_forward(shard, sequences, length, "again", sums=False, **shape)
        layer += again if mode == "full" else [w for w in again if w.kind != "product"]
    if in_ticks:
        layer += work.layer_forward(shard, sequences, length, remat=mode, **shape)
    layer += work.layer_backward(shard, sequences, length, remat=mode, **shape)
    second_pass = work.of_chains(layer[len(first_pass) :], count)
    layer = first_pass + second_pass
    # gpipe and circular write what the ticks keep in its place.
    several = work.COPIED if in_ticks or config.accumulation > 1 else 1
    layer += work.kept(shard, sequences * length, mode, several, size=size, sp=sp)
    layers = model.n_layers // mesh.pp
    microbatches = 1 if schedule is None else schedule.microbatches
    calls = layers * count * microbatches * config.accumulation
    timer.work(layer, calls)
    weights = work.layer_weights(shard, mode, size, count)
    timer.work(weights, calls / count)
    at_the_ends = microbatches if in_ticks else 1
    tokens = microbatch(config) * microbatches * length // at_the_ends
    shares = 1
    if schedule is not None and schedule.shares_head(tokens // length, model.vocab_size, mesh.tp):
        shares = schedule.stages
    timer.work(work.head_loss(shard, tokens // shares, config.loss_chunk, size), at_the_ends * config.accumulation)
    timer.work(work.embed(shard, tokens, size), at_the_ends * config.accumulation)
    parameters = shard.parameters(layers)
    # Before the optimizer: its memory traffic is in no tick.
    sent = [] if free else messages.training(config, copied)
    if by_layer:
        one = overlap.load(machine, second_pass, float32)
        timer.backward = Load(count * one.products, count * one.other)
    if not free:
        timer.messages(sent)
    if count > 1 and sent:
        casts = [w for w in weights if w.beside == "forward"] if mode == "full" else []
        _in_chains(timer, first_pass, second_pass, casts, loops=calls / count / layers, layers=layers, cut=sp > 1,
                   halves=mode != "dots")  # fmt: skip
    if schedule is not None:
        timer.settle()
    bubble = _bubble(timer, schedule, _forward_pass(timer, first_pass, calls, sent) if in_ticks else 0.0)
    zero1 = mesh.dp if config.data_parallel.zero1 else 1
    timer.work(work.optimizer(parameters, zero1) + work.accumulate(parameters, config.accumulation))
    why = why if config.mesh.tp > 1 else ""
    return dataclasses.replace(timer.forecast(name, bubble), chains=count, chains_why=why, copied=which)


def _in_chains(timer: Timer, forward: Sequence[Work], backward: Sequence[Work], casts: Sequence[Work], *, loops: float,
               layers: int, cut: bool, halves: bool) -> None:  # fmt: skip
    """Puts messages of a step's layers beside the chains' work: forward and backward, of one of them in a layer.

    loops: over the layers. cut: sequence parallelism is on. halves: a hop can end in the middle of a sublayer.
    """
    count, machine = timer.chains, timer.machine
    given = {"halves": halves, "float32": timer.float32}
    handed_on = overlap.HANDED_ON and layers > 1 and not cut
    casts = casts if handed_on else ()
    steps = overlap.forward_steps(machine, [forward] * count, casts=casts, early=not overlap.HANDED_ON, **given)
    back = overlap.backward_steps(machine, backward, count, **given)
    if cut:
        steps = overlap.cut_steps(steps, count, overlap.SUBLAYERS)
        back = overlap.cut_steps(back, count, [pair[::-1] for pair in overlap.SUBLAYERS[::-1]])
    timer.chained(steps, back, alone=loops if handed_on else math.inf, more=loops if handed_on else 0.0)


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


def prompt_chains(model: ModelConfig, machine: Machine, tp: int, *, batch: int, length: int, chains: int | str = AUTO,
                  compression=None) -> tuple[int, str]:  # fmt: skip
    """Returns how many parts of prompts go through each layer side by side, and why: as
    `taco_jax.inference.settings.Layout.chains_of`, the machine's link in the place of the environment's."""
    from taco_jax.inference.compiled import bucket

    if tp == 1:
        return 1, "tp is 1"
    slow, count, least, why = slow_link(machine.link), chains, 0, "as configured"
    if chains == AUTO:
        if slow is None:
            return 1, "over NVLink they lose more in their products than they hide"
        count, why = rule.CHAINS, f"{slow}: messages of one travel beside products of the other"
        least = _least_bytes(machine, tp, compression)
    padded = bucket(length, model.max_length)
    nbytes = batch * padded * model.d_model * 2
    if nbytes < count * least:
        return 1, f"a chain's messages would have {nbytes // count:,} bytes, below {least:,}"
    if batch % count and padded % count:
        return 1, f"{count} divide neither the {batch} prompts nor their {padded:,} tokens"
    return count, why


def first_token(model: ModelConfig, machine: Machine, codecs: str, *, tp: int, length: int, batch: int = 1,
                min_bytes: int | None = None, feedback: bool | None = None, chains: int | str = AUTO,
                link: str = "auto") -> Forecast:  # fmt: skip
    """The forecast of the time to the first token of `batch` prompts of `length` tokens, weights in bfloat16.

    feedback: sums take along what the one before lost; None: codecs below 8 bits do, unless one kernel sends them.
    chains, link: as the flags of `taco_jax.generate`.
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
        feedback = feeds_back(machine, codec, tp, link)
    compression = Compression(codec, min_bytes=min_bytes, link=link)
    shape = {"batch": batch, "length": length}
    count, why = prompt_chains(model, machine, tp, chains=chains, compression=compression, **shape)
    count, why = (1, "nothing is sent") if free and chains == AUTO else (count, why)
    timer = Timer(
        machine, {"dp": 1, "pp": 1, "tp": tp}, min_bytes=min_bytes, chains=count, long_messages=link == "copy"
    )
    fused = fused_attention(machine, model, None, False)
    # Parts of the batch, or else of each sequence, which fill up where they do not divide it.
    cut = batch % count != 0
    part, rows = (batch, math.ceil(length / count)) if cut else (batch // count, length)
    of_chains = [
        work.layer_forward(shard, part, rows, fused_attention=fused, before=i * rows if cut else 0)
        for i in range(count)
    ]
    if count > 1 and feedback and not codec.exact:
        # Of one chain the error is added in the product before its sum.
        added = Work(work.DOWN, "forward", "memory", bytes=2 * 3 * 2 * part * rows * shard.d, kernels=2)
        of_chains = [[*layer, added] for layer in of_chains]
    # Caches are written.
    cache = Work(work.QKV, "forward", "memory", bytes=2 * 2 * 2 * batch * length * shard.kv)
    layer = [w for of_chain in of_chains for w in of_chain] + [cache, *work.prompt_weights(shard, chains=count)]
    timer.work(layer, model.n_layers)
    timer.work(work.embed(shard, batch * length, gradients=False))
    timer.work([Work("head", "forward", "product", m=batch, n=shard.v, k=shard.d)])
    timer.part("host").memory += machine.host
    if not free:
        more = {"feedback": feedback, "chains": count, "link": link}
        timer.messages(messages.prompt(model, tp, batch, length, codec, **more))
    if count > 1 and not free:
        handed_on = overlap.HANDED_ON
        alone = 1 if handed_on else math.ceil(model.n_layers / overlap.LAYERS_A_BODY)
        timer.chained(overlap.forward_steps(machine, of_chains), alone=alone, more=1.0 if handed_on else 0.0)
    return dataclasses.replace(timer.forecast(codecs), chains=count, chains_why=why if tp > 1 else "")


def feeds_back(machine: Machine, codec: Codec, tp: int, link: str = "auto") -> bool:
    """Returns whether inference takes errors along by itself."""
    one = machine.one_kernel(machine.link, tp, link in ("auto", "nvlink")) and machine.hosts == 1
    return codec.element not in EIGHT_BITS and not one


def fused_attention(machine: Machine, model: ModelConfig, implementation: str | None, float32: bool) -> bool:
    """Returns whether attention is cuDNN's, as `taco_jax.models.blocks.implementation` chooses."""
    capability = machine.gpu.capability
    fits = not float32 and model.head_dim % 8 == 0 and model.head_dim <= 128
    return implementation != "xla" and fits and (capability is None or capability >= (8, 0))


def tokens_of(config: TrainConfig) -> int:
    """Tokens of a step."""
    return config.global_batch * config.data.sequence_length


__all__ = ["Forecast", "Part", "first_token", "step", "tokens_of"]
