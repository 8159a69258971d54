"""The messages of a training step and of a prompt, by site: what the site table of a traced step lists, from the
configuration alone (tests/forecast/test_messages.py compares both).

B sequences of a microbatch on one device, L tokens, D model.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math

from taco_jax.codec import AUTO, Codec, as_codec
from taco_jax.compression.compression import codec_pair
from taco_jax.config import TrainConfig, overlap, pipeline_schedule, sequence_parallel
from taco_jax.forecast.work import DOWN, OUT, QKV, UP, Shard
from taco_jax.nn.vocab_parallel import CHUNK

EXACT = as_codec("none")
LAYER_GRADIENTS = "dp/grads/layer"
"""Site of a layer's matrices, which are sent beside the backward pass of another layer."""


@dataclasses.dataclass(frozen=True)
class SiteMessage:
    """A message of a site, `calls` times a step.

    op: psum, psum_scatter, all_gather, all_to_all or ppermute. axis: tp, pp or dp; ranks: of it. elements: of the whole
    tensor, size: bytes of each. codec: as configured; what goes exactly for its size is decided where it is timed.
    per_token: width of a token, for codecs that have a scale for each. buckets: parts that travel one after the other.
    link: as of `Compression`.
    """

    site: str
    direction: str
    op: str
    axis: str
    ranks: int
    elements: int
    size: int
    calls: int
    codec: Codec = EXACT
    kind: str = "activation"
    between: Codec | None = None
    per_token: int = 0
    buckets: int = 1
    feedback: bool = False
    link: str = "auto"

    @property
    def nbytes(self) -> int:
        return self.elements * self.size


def training(config: TrainConfig, copied: bool = False) -> list[SiteMessage]:
    """The messages of one step of a configuration that `check` has returned.

    copied: copy engines bring gradients' sums where the configuration leaves their link open.
    """
    model, mesh, c = config.model, config.mesh, config.compression
    schedule = pipeline_schedule(config)
    microbatches = 1 if schedule is None else schedule.microbatches
    sequences = config.global_batch // (mesh.dp * config.accumulation)
    length, size = config.data.sequence_length, 4 if config.compute_dtype == "float32" else 2
    whole = sequences * length * model.d_model
    chains = 1 if config.chains == AUTO else config.chains
    of_layer = whole // microbatches // chains
    sp, again = sequence_parallel(config)[0], 1
    ticks = 1
    layers = model.n_layers // mesh.pp
    if schedule is not None:
        # GPipe's ticks all compute; those of 1F1B that are empty do not, and each runs forward twice.
        ticks = schedule.forward_ticks if schedule.kind != "1f1b" else schedule.microbatches
        layers //= schedule.chunks
        again = 2 if schedule.kind == "1f1b" else 1
    shares_head = schedule is not None and schedule.shares_head(sequences, model.vocab_size, mesh.tp)
    calls = layers * chains * ticks * config.accumulation
    out: list[SiteMessage] = []

    planned = {n for n, s in c.planned.sites.items() if s.error_feedback} if c.planned is not None else ()

    # Stages run no kernel over NVLink.
    in_stages = lambda link: "nccl" if schedule is not None and link == "auto" else link
    links = {"forward": in_stages(c.link), "backward": in_stages(c.backward_link or c.link)}

    def site(name: str, entering: bool, elements: int, calls: int, again: int = 1) -> None:
        """A pair of messages: of a column-parallel layer's input (entering) or a row-parallel one's output."""
        forward, backward = _codecs(config, name)
        fed = {"forward": c.error_feedback or name in planned, "backward": c.backward_error_feedback}
        own = links | ({"backward": "copy"} if copied and not any(fed.values()) else {})
        add = lambda direction, op, codec, calls: out.append(
            SiteMessage(
                name, direction, op, axis="tp", ranks=mesh.tp, elements=elements, size=size, calls=calls, codec=codec,
                between=_between(c.between_hosts), feedback=fed[direction] and not codec.exact, link=own[direction],
            )
        )  # fmt: skip
        if sp:
            ops = ("all_gather", "psum_scatter") if entering else ("psum_scatter", "all_gather")
            add("forward", ops[0], forward, calls * again)
            add("backward", ops[1], backward, calls)
        elif entering:
            add("backward", "psum", backward, calls)
        else:
            add("forward", "psum", forward, calls * again)

    if mesh.tp > 1:
        explicit = schedule is not None and schedule.kind == "1f1b"
        ends = (whole // microbatches, microbatches * config.accumulation) if explicit else (whole, config.accumulation)
        site("embed", False, *ends, again)
        for name, entering in ((QKV, True), (OUT, False), (UP, True), (DOWN, False)):
            site(name, entering, of_layer, calls, again)
        if shares_head:
            ends = (ends[0] // mesh.pp, ends[1])
        site("head", True, *ends)
        tokens = ends[0] // model.d_model
        chunks = math.ceil(tokens / (config.loss_chunk or CHUNK))
        stats = 3 * mesh.tp * math.ceil(tokens / chunks)
        softmax = {"elements": stats, "size": 4, "calls": chunks * ends[1], "kind": "other"}
        out.append(SiteMessage("head/softmax", "forward", "all_gather", axis="tp", ranks=mesh.tp, **softmax))
    if schedule is not None:
        stage = whole // microbatches // (mesh.tp if sp else 1)
        sends = (schedule.ticks if schedule.kind == "1f1b" else schedule.forward_ticks) * config.accumulation
        for direction, name in (("forward", config.pipeline.forward), ("backward", config.pipeline.backward)):
            sent = {"elements": stage, "size": size, "calls": sends, "codec": as_codec(name)}
            out.append(
                SiteMessage("pp/act", direction, "ppermute", axis="pp", ranks=mesh.pp, per_token=model.d_model, **sent)
            )
        if shares_head:
            sent = {"elements": stage * microbatches, "size": size, "calls": config.accumulation}
            for direction in ("forward", "backward"):
                out.append(SiteMessage("pp/head", direction, "all_to_all", axis="pp", ranks=mesh.pp, **sent))
        ends = Shard(model, mesh.tp).end_weights + model.d_model
        shared = {"elements": ends, "size": 4, "calls": 1, "kind": "other"}
        out.append(SiteMessage("pp/grads", "backward", "psum", axis="pp", ranks=mesh.pp, **shared))
    return out + (_data_parallel(config) if mesh.dp > 1 else [])


def _data_parallel(config: TrainConfig) -> list[SiteMessage]:
    mesh, c = config.mesh, config.data_parallel
    n = Shard(config.model, mesh.tp).parameters(config.model.n_layers // mesh.pp)
    sdp4 = c.gradients == "sdp4"
    gradients = as_codec("int8h" if sdp4 else c.gradients)
    between = as_codec("int4h") if sdp4 else None
    buckets = max(1, math.ceil(4 * n / (c.bucket_mb * 1e6)))
    common = {"axis": "dp", "ranks": mesh.dp, "elements": n, "calls": 1, "buckets": buckets}
    op = "psum_scatter" if c.zero1 else "psum"
    sums = {"codec": gradients, "kind": "gradient", "between": between, "size": 4}
    reduce = SiteMessage("dp/grads", "backward", op, **sums, **common)
    by_layer = []
    if overlap(config)[0]:
        elements, layers = Shard(config.model, mesh.tp).cut_weights, config.model.n_layers
        of_layer = {"axis": "dp", "ranks": mesh.dp, "elements": elements, "calls": layers}
        by_layer = [SiteMessage(LAYER_GRADIENTS, "backward", op, **sums, **of_layer)]
        rest = n - layers * elements
        fewer = max(1, math.ceil(4 * rest / (c.bucket_mb * 1e6)))
        reduce = dataclasses.replace(reduce, elements=rest, buckets=fewer)
    if not c.zero1:
        return [*by_layer, reduce]
    bf16 = c.parameters == "bfloat16"
    codec = EXACT if bf16 else as_codec(c.parameters)
    size = 2 if bf16 else 4
    gather = SiteMessage("dp/params", "forward", "all_gather", size=size, codec=codec, kind="parameter", **common)
    return [*by_layer, reduce, gather]


def prompt(model, tp: int, batch: int, length: int, codec: Codec, *, size: int = 2, feedback: bool = False,
           chains: int = 1, link: str = "auto") -> list[SiteMessage]:  # fmt: skip
    """The messages before the first token of `batch` prompts: the embedding's sum and the logits go exactly."""
    if tp == 1:
        return []
    n = batch * length * model.d_model
    of = {"axis": "tp", "ranks": tp}
    exact = lambda site, op, elements, size: SiteMessage(
        site, "forward", op, elements=elements, size=size, calls=1, **of
    )
    sums = {"elements": n // chains, "size": size, "calls": chains * model.n_layers, "codec": codec, "link": link}
    row = lambda site: SiteMessage(site, "forward", "psum", feedback=feedback and not codec.exact, **sums, **of)
    last = [exact("error", "psum", batch * model.d_model, size)] if feedback and not codec.exact else []
    logits = exact("head/logits", "all_gather", batch * Shard(model, tp).v * tp, 4)
    return [exact("embed", "psum", n, size), row(OUT), row(DOWN), *last, logits]


def _codecs(config: TrainConfig, site: str) -> tuple[Codec, Codec]:
    c = config.compression
    if c.planned is not None:
        found = c.planned.sites.get(site)
        return (as_codec(c.forward), as_codec(c.backward)) if found is None else found.compression().codecs
    for pattern, codecs in c.plan.items():
        if fnmatch.fnmatchcase(site, pattern):
            forward, backward = codec_pair(codecs)
            return as_codec(forward), as_codec(backward)
    return as_codec(c.forward), as_codec(c.backward)


def _between(name: str | None) -> Codec | None:
    return None if name is None else as_codec(name)
