"""The dry run: what a configuration would need and send, without allocating anything.

    python -m taco_jax.train --config experiments/qwen7b.py --dry-run

Memory comes from the shapes and shardings of the state and from XLA's own analysis of the compiled step; communication
from the site table that tracing the step recorded. Nothing is a formula of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp

from pallas_kernels import OPERATIONS
from pallas_kernels.nvlink.support import OPERATIONS as LINK_OPERATIONS
from taco_jax.collectives import comm_log
from taco_jax.collectives.topology import ranks_per_host
from taco_jax.compression import dispatch, tuned
from taco_jax.config import ConfigError, TrainConfig, chains, microbatch, overlap, remat, sequence_parallel, to_dict
from taco_jax.mesh import make_mesh
from taco_jax.train import links, optim
from taco_jax.train import step as step_lib
from taco_jax.train.data_parallel import SDP4

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. base: weights that adapters leave as they are.

    peak: XLA's arguments + outputs + temporaries - donated buffers of the compiled step.
    """

    params: int
    copy: int
    optimizer: int
    scales: int
    gradients: int
    batch: int
    temporary: int
    peak: int
    base: int = 0


def local_bytes(tree) -> int:
    """Bytes of one device's shards of a tree of ShapeDtypeStructs with shardings."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def memory(program: step_lib.Program) -> Memory:
    """Compiles the step (nothing is allocated) and reads its memory."""
    shapes = program.state_shapes
    analysis = program.step.memory_analysis()
    peak = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    return Memory(
        local_bytes(shapes.params), local_bytes(shapes.copy), local_bytes(shapes.opt_state), local_bytes(shapes.scales),
        gradients=program.data_parallel.gradient_bytes, batch=local_bytes(program.batch_shapes),
        temporary=analysis.temp_size_in_bytes, peak=peak, base=local_bytes(shapes.base),
    )  # fmt: skip


def report(config: TrainConfig, mesh: jax.sharding.Mesh | None = None) -> str:
    """The dry run's text: resolved config, memory per device with a verdict, the table of communication sites."""
    mesh = make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp) if mesh is None else mesh
    program = step_lib.build(config, mesh)
    choices = trace(program)
    kernels = _kernel_text(program, choices)
    stages = [] if config.mesh.pp == 1 else [_pipeline_text(program)]
    texts = [_config_text(config), kernels, *_sequence_text(config), *_chains_text(program), *stages]
    texts += _hosts_text(program)
    texts += [*_data_parallel_text(program), *_attention_text(program)]
    return "\n\n".join([*texts, _memory_text(config, program), _site_text(program)])


def trace(program: step_lib.Program) -> dispatch.Choices:
    """Traces the step, which fills its site table. Returns what runs the codecs of its messages.

    Raises:
      ConfigError: a backend is forced that cannot run one of them.
    """
    try:
        with dispatch.record() as choices:
            program.table  # noqa: B018 (the property traces)
    except dispatch.KernelUnavailableError as error:
        raise ConfigError(f"compression: {error}") from error
    return choices


def _config_text(config: TrainConfig) -> str:
    values, planned = to_dict(config), config.compression.planned
    if planned is not None:
        values["compression"]["plan"] = {planned.source: f"{planned.made.get('budget')}, {len(planned.sites)} sites"}
    return "config\n" + json.dumps(values, indent=2)


def _kernel_text(program: step_lib.Program, choices: dispatch.Choices) -> str:
    """Returns what runs each codec, one line where it is the same for all operations, and from what size messages use
    it."""
    device = program.mesh.devices.flat[0]
    lines = [f"codec implementation ({device.device_kind})"]
    of_levels = {level.codec for row in program.table.rows() for level in row.levels}
    alone = {row.codec for row in program.table.rows() if row.kind == "activation"}
    for codec in sorted({*program.codecs, *program.data_parallel.codecs, *of_levels, *(alone - {"none"})}):
        by_choice: dict[tuple[str, str], list[str]] = {}
        for operation in OPERATIONS:
            for choice in choices.get((codec, operation), ()):
                by_choice.setdefault(choice, []).append(operation)
        if not by_choice:
            between = program.config.compression.between_hosts if program.ranks_per_host == 1 else None
            why = "it sends values as they are" if codec == "none" else "every message goes exactly"
            how = f"jax.lax: {why}" if between is None else f"unused: every message goes between hosts, in {between}"
            lines.append(f"  {codec:12} {how}")
        for (name, reason), operations in by_choice.items():
            which = "" if len(by_choice) == 1 else f" ({', '.join(operations)})"
            lines.append(f"  {codec:12} {name}{which}: {reason}")
        for operation in LINK_OPERATIONS:
            for name, reason in choices.get((codec, operation), ()):
                lines.append(f"  {codec:12} {operation} by {name}: {reason}")
    for codec in program.codecs:
        # What is tuned is tuned for sums over tp, and stages send messages of every size compressed.
        if codec != "none" and codec in program.codecs_of_sums:
            lines += [_tuned_line(program, codec, device), *_chains_line(program, codec, device)]
    return "\n".join(lines)


def _tuned_line(program: step_lib.Program, codec: str, device) -> str:
    """From what size messages are compressed, and who says so."""
    ranks, given = program.config.mesh.tp, program.config.compression.min_bytes
    if given is not None:
        return f"  {codec:12} messages from {given:,} bytes, as configured"
    link = program.config.compression.link
    least, file = tuned.default_min_bytes(codec, ranks, device, link), tuned.path(device.platform)
    if (origin := tuned.origin(codec, ranks, device)) is not None:
        source = f"tuned for {tuned.entry_name(device.device_kind, ranks)} in {origin}"
    elif file is None:
        source = "the default without a file of tuned values"
    else:
        source = f"the default: {file} has nothing for {tuned.entry_name(device.device_kind, ranks)}; "
        source += "python -m taco_jax.tune measures it"
    if least == tuned.NEVER:
        return f"  {codec:12} no messages: compressing never paid, {source}"
    sums = (tuned.find(codec, ranks, device) or tuned.Tuned(None, ())).sums
    shots = f"; sums {tuned.describe_sums(sums)}" if sums else ""
    return f"  {codec:12} messages from {least:,} bytes, {source}{shots}"


def _chains_line(program: step_lib.Program, codec: str, device) -> list[str]:
    """Says it where chains alone make the layers' messages too small to be compressed."""
    compression, count, ranks = program.config.compression, program.parallel.chains, program.config.mesh.tp
    least = compression.min_bytes
    if least is None:
        least = tuned.default_min_bytes(codec, ranks, device, compression.link)
    rows = [r for r in program.table.rows() if r.site.startswith("layers/") and r.codec == "none"]
    sizes = {r.elements * jnp.dtype(r.dtype).itemsize for r in rows}
    cut = sorted(size for size in sizes if size < least <= size * count)
    line = "  {:12} chains={} cuts the layers' messages to {:,} bytes, which go exactly; --chains 1 compresses them"
    return [line.format("", count, size) for size in cut]


def _sequence_text(config: TrainConfig) -> list[str]:
    """Returns whether activations are cut along the sequence, and why; nothing where tp is 1."""
    on, why = sequence_parallel(config)
    return [f"sequence parallelism: {'on' if on else 'off'} ({why})"] if config.mesh.tp > 1 else []


def _chains_text(program: step_lib.Program) -> list[str]:
    """Returns the chains of a layer, and which sums are copied, and why; nothing where tp is 1."""
    count, why = chains(program.config, program.mesh.devices.flat[0])
    if program.config.mesh.tp == 1:
        return []
    return [f"chains: {count} ({why})", links.describe(program.parallel.plan, program.config, program.mesh)]


def _attention_text(program: step_lib.Program) -> list[str]:
    """Returns what positions attend to and by what; nothing where each sees all before it."""
    model, end = program.config.model, program.parallel.end_token
    slides = model.windows if isinstance(model.windows, tuple) else (model.windows,) * model.n_layers
    seen = []
    if any(slides):
        seen.append(f"{model.sliding_window} positions back in {sum(slides)} of {model.n_layers} layers")
    if end is not None:
        seen.append(f"inside documents, which end with token {end}")
    held = "" if program.parallel.attention_implementation == "cudnn" else ", which holds the scores of all pairs"
    return [f"attention: {', '.join(seen)} (by {program.parallel.attention_implementation}{held})"] if seen else []


def _pipeline_text(program: step_lib.Program) -> str:
    """The schedule's numbers; what it needs of memory is in `_memory_text`, what it sends in `_site_text`."""
    s, accumulation, c = program.schedule_of_stages, program.config.accumulation, program.config.compression
    chunks = f", in {s.chunks} chunks each" if s.chunks > 1 else ""
    times = f", {accumulation} times a step" if accumulation > 1 else ""
    again = "; each stage runs again in the backward pass" if s.kind == "1f1b" else ""
    lines = [
        f"pipeline ({s.kind})",
        f"  stages       {s.stages} of {program.config.model.n_layers // s.stages} layers{chunks}",
        f"  microbatches {s.microbatches} of {microbatch(program.config)} sequences{times}",
        f"  bubble       {s.bubble:.1%} of a stage's time, {s.ticks} ticks",
        f"  in flight    {s.in_flight} microbatches on a stage at most{again}",
        "  remat        {} ({})".format(*remat(program.config)),
        *(["  link         NCCL's: link=auto takes no NVLink kernels in stages"] if c.link == "auto" else []),
    ]
    return "\n".join(lines)


def _hosts_text(program: step_lib.Program) -> list[str]:
    """Returns whether sums over tp go in levels, and why; nothing where tp is on one host and none were asked for."""
    tp, local, c = program.config.mesh.tp, program.ranks_per_host, program.config.compression
    if tp == 1 or (local == tp and c.algorithm != "hierarchical"):
        return []
    hosts = "one host" if local == tp else f"{tp // local} hosts of {local} ranks"
    rows = [r for r in program.table.rows() if "tp" in r.axis and r.kind == "activation" and r.codec != "none"]
    least = tuned.hierarchical_min_bytes(program.mesh.devices.flat[0])
    if local == tp:
        what = "flat: algorithm=hierarchical has levels only where tp spans hosts"
    elif local == 1:
        codec = "" if c.between_hosts is None else f", in {c.between_hosts} (compression.between_hosts)"
        what = f"flat{codec}: no host has two ranks of tp"
    elif c.algorithm not in ("auto", "hierarchical"):
        what = f"flat, as configured; algorithm=hierarchical sends 1/{local} as much between hosts"
    elif not any(r.levels for r in rows):
        what = f"flat: no message is compressed and has {least:,} bytes, from which on algorithm=auto goes in levels"
    else:
        which = f"those from {least:,} bytes on" if c.algorithm == "auto" and least else "all"
        what = f"hierarchical, {which}: inside a host, between hosts and inside again, 1/{local} as much between hosts"
    lines = [f"tensor parallelism (tp {tp})", f"  {hosts} ({_source_of_hosts(program)})", f"  messages: {what}"]
    return ["\n".join(lines)]


def _source_of_hosts(program: step_lib.Program) -> str:
    given = program.config.mesh.devices_per_host
    return "as JAX says" if given is None else f"mesh.devices_per_host={given}"


def _data_parallel_text(program: step_lib.Program) -> list[str]:
    """Returns how gradients are summed over dp and who holds what; nothing where dp is 1."""
    dp, c = program.data_parallel, program.config.data_parallel
    if dp.ranks == 1:
        return []
    codec, between, inside = dp.gradients.codecs[1].name, dp.gradients.between, dp.gradients.ranks_per_host
    how = f"{codec} over {dp.ranks} ranks"
    if between is not None:
        how = f"{codec} inside hosts of {inside} ranks, {between.name} between {dp.ranks // inside} hosts"
    lines = [f"data parallelism (dp {dp.ranks})", f"  gradients: {how}, float32 sums"]
    if c.gradients == SDP4:
        inside = ranks_per_host(program.mesh, "dp", program.config.mesh.devices_per_host)
        hosts = f"{dp.ranks // inside} hosts of {inside} ranks" if inside < dp.ranks else "one host"
        level = {1: ", so only the level between hosts", dp.ranks: ", so only the level inside"}.get(inside, "")
        lines.append(f"  sdp4: {hosts}{level} ({_source_of_hosts(program)})")
    on, why = overlap(program.config)
    sent = "each layer's beside the layer before it, in the backward pass" if on else "after the backward pass"
    lines.append(f"  sent {sent} ({why})")
    if not dp.sharded:
        lines.append("  optimiser state: whole on every rank (data_parallel.zero1 shares it out)")
    else:
        lines.append(f"  optimiser state: in {dp.ranks} shares{', float32 master weights too' if dp.has_copy else ''}")
        kept = dp.copy_dtype if dp.has_copy else "float32"
        sent = f"changes sent in {c.parameters}" if dp.differences else f"sent in {dp.gather_dtype}"
        lines.append(f"  parameters: whole on every rank in {kept}, {sent}")
    return ["\n".join(lines)]


def _memory_text(config: TrainConfig, program: step_lib.Program) -> str:
    m = memory(program)
    platform = program.mesh.devices.flat[0].platform
    shares = f", in {program.data_parallel.ranks} shares" if program.data_parallel.sharded else ""
    copy = program.data_parallel.copy_dtype
    params = [("parameters (float32 master, the only stored copy)", m.params)]
    if m.copy:
        params = [(f"parameters (float32 master{shares})", m.params), (f"parameters ({copy} copy in use)", m.copy)]
    if program.adapters is not None:
        params = [(name.replace("parameters", "adapters"), size) for name, size in params]
        params = [("parameters (float32, without gradient or optimiser)", m.base), *params]
    rows = [
        *params,
        (f"optimiser ({optim.describe(config.optimizer)}{shares})", m.optimizer),
        ("site scales", m.scales),
        ("gradients (float32)", m.gradients),
        ("activations and workspace (XLA temporaries less gradients)", max(m.temporary - m.gradients, 0)),
        (f"peak by XLA's memory_analysis ({platform} backend)", m.peak),
    ]
    fits = m.peak <= config.gpu_memory_gb * GB
    share = m.peak / GB / config.gpu_memory_gb
    verdict = f"{'fits' if fits else 'does NOT fit'} {config.gpu_memory_gb:g} GB: {share:.0%} used"
    note = "" if platform == "gpu" else f"; the {platform} backend plans its temporaries differently from a GPU's"
    lines = [f"  {name:60} {size / GB:10.3f} GB" for name, size in rows]
    return "\n".join(["memory per device", *lines, f"  verdict: {verdict}{note}"])


def _site_text(program: step_lib.Program) -> str:
    rows = program.table.rows()
    columns = ("site", "direction", "operation", "axis", "codec", "calls", "MB/step", "bits", "ratio", "algorithm")
    layout = "  {:34} {:9} {:13} {:9} {:12} {:>6} {:>10} {:>7} {:>6}  {}"
    title = "communication per step, sent by one device (bits per element and ratio against bf16)"
    lines = [title, layout.format(*columns)]
    for r in sorted(rows, key=lambda r: (r.kind, r.site)):
        ratio = r.bytes_bf16 / r.bytes if r.bytes else 1.0
        names = (r.site, r.direction, r.op, "x".join(r.axis), r.codec)
        numbers = (r.calls, f"{r.bytes / 1e6:.3f}", f"{r.bits_per_element:.3f}", f"{ratio:.3f}")
        how = "{} ({})".format(*r.how) if r.how[0] else ""
        lines.append(layout.format(*names, *numbers, how).rstrip())
        for level in r.levels:
            who = f"inside a host, {level.ranks} ranks" if level.name == "inside" else f"between {level.ranks} hosts"
            numbers = (level.codec, r.calls, f"{r.bytes_of(level.name) / 1e6:.3f}", "", "", "")
            lines.append(layout.format(f"  {who}", "", "", "", *numbers).rstrip())
    sent, bf16 = program.table.total()
    everything, _ = program.table.total(None)
    traffic = "TP activation traffic" if program.config.mesh.pp == 1 else "TP and PP activation traffic"
    if sent:
        saving = f"{bf16 / sent:.3f}x less than bf16 ({bf16 / 1e6:.3f} MB)"
        lines.append(f"  {traffic} {sent / 1e6:.3f} MB a step, {saving}")
    else:
        lines.append(f"  {traffic}: none (tp 1)")
    lines += _in_levels(rows, "activation")
    for kind, what in (("gradient", "gradients over dp"), ("parameter", "parameters over dp")):
        sent, bf16 = program.table.total(kind)
        if sent:
            lines.append(
                f"  {what} {sent / 1e6:.3f} MB a step, {bf16 / sent:.3f}x less than bf16 ({bf16 / 1e6:.3f} MB)"
            )
        lines += _in_levels(rows, kind)
    lines.append(f"  all traffic {everything / 1e6:.3f} MB a step")
    return "\n".join(lines)


def _in_levels(rows: list[comm_log.Row], kind: str) -> list[str]:
    """The line of what rows of a kind send inside hosts and between; nothing where none goes in levels."""
    inside, between = (sum(r.bytes_of(level) for r in rows if r.kind == kind) for level in ("inside", "between"))
    mb = lambda n: f"{n / 1e6:.3f} MB"
    return [f"  of it in levels: {mb(inside)} inside hosts, {mb(between)} between hosts"] if between else []
