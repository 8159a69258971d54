"""`python -m taco_jax.advise`: the forecast on the command line.

Its own flags are below; every other flag is one of `python -m taco_jax.train`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from taco_jax.codec import AUTO
from taco_jax.compression import recommended
from taco_jax.compression.compression import codec_pair
from taco_jax.config import ConfigError, TrainConfig, cli, overlap
from taco_jax.config.checks import check
from taco_jax.errors import check_writable
from taco_jax.forecast import advice, hardware, links, measure, messages, plot, predict, record, report, scale
from taco_jax.forecast.advice import Advice, Choice
from taco_jax.forecast.cost import Machine
from taco_jax.forecast.predict import Forecast
from taco_jax.forecast.work import Shard

PROGRAM = "python -m taco_jax.advise"
CODECS = {"training": "taco,int8h,int6h,int4h", "first_token": "taco,int8h,int6h,int5h,int4h,mxfp4"}
LIMITS = {"training": None, "first_token": 0.01}
"""Of the recorded change. Training: None, the bound of experiments/accuracy.py; perplexity: 1 %, a choice."""
PLAN = "the plan"
"""The row of a configuration's own `compression.plan`, which no codec for all sites takes the place of."""
DESCRIPTION = """Say what compression will gain, before anything runs: without GPUs, within seconds.

  python -m taco_jax.advise --config experiments/qwen7b.py --mesh.tp 4 --gpu H200 --link host
  python -m taco_jax.advise --config experiments/qwen7b.py --gpu L4 --link 12GB/s,15us --ttft 8192
  python -m taco_jax.advise --model HF_FOLDER --mesh.tp 8 --gpu H100 --link pcie5x16 --ttft 4096
  python -m taco_jax.advise --config experiments/qwen7b.py --gpu H100 --link nvlink --between 100Gb/s --scale 8..8192
  python -m taco_jax.advise --measure

Prints the time of a training step, or to the first token, exact and with each codec, split by site; the ceiling; what
codecs cost in loss by the record; one recommendation; how sure it is (docs/forecast.md). Every flag of
python -m taco_jax.train is taken too."""


def _parser() -> cli.Parser:
    parser = cli.Parser(prog=PROGRAM, description=DESCRIPTION)
    add = parser.add_argument
    add("--gpu", help=f"GPU: {', '.join(hardware.names())}; another needs --gpu-tflops")
    add("--gpu-tflops", type=float, help="dense bf16 TFLOP/s of one GPU, in the place of its data sheet's")
    add("--gpu-memory", type=float, help="GB/s of its memory")
    add("--link", default=None, help=f"what joins the GPUs of a host: {links.EXAMPLES}")
    add("--hosts", type=int, default=1, help="hosts with equally many of the mesh's devices")
    add("--between", default=None, help="what one network card of a host carries: 100Gb/s, or 100Gb/s,10us")
    add("--rails", type=int, default=1, help="network cards of a host; a GPU sends by one")
    add("--ttft", type=int, default=None, help="tokens of a prompt: the time to the first token, not of a step")
    add("--batch", type=int, default=None, help="prompts at once, with --ttft; default: 1")
    add(
        "--model",
        default=None,
        help="Hugging Face folder (its config.json), .gguf file or run, in the place of a config's",
    )
    add("--codecs", default=None, help="codecs to compare, FORWARD or FORWARD:BACKWARD, separated by semicolons")
    add("--loss", default=None, help="most that the recorded loss may change, such as 0.5%%")
    add("--json", type=Path, default=None, help="file of the same figures")
    add("--plot", type=Path, default=None, help="picture: the speed-up over the link's speed and tokens")
    add("--scale", default=None, help="numbers of GPUs, such as 8..8192, laid out anew for each")
    add("--per-host", type=int, default=None, help=f"GPUs of a host, with --scale; default: {scale.PER_HOST}")
    add("--measure", action="store_true", help="measure this machine's devices first, in less than a minute")
    add("--measured", type=Path, default=None, help="file of what was measured, in the place of the usual one")
    return parser


def main(arguments: Sequence[str]) -> int:
    options, rest = _parser().parse_known_args(list(arguments))
    _check(options)
    path = options.measured or measure.default_path()
    config = cli.parse(rest, prog=PROGRAM)
    measured = None
    if options.measure:
        check_writable("--measured", path)
        measured = measure.run(config.devices)
        measure.write(path, measured)
        print(_measured_text(measured, path))
        if not _asks_more(options, rest):
            return 0
    elif options.link == "measured" or options.measured:
        measured = measure.read(path)
        if measured is None and options.measured:
            raise ConfigError(f"--measured {path}: there is no such file; make it with --measure --measured {path}")
    config = check(dataclasses.replace(config, model=_model(options.model)) if options.model else config)
    if options.ttft is None and config.lora.rank is not None:
        raise ConfigError(
            f"lora.rank={config.lora.rank}: the forecast is of steps that train the model's own weights; leave it out, "
            f"or ask for the time of a prompt by --ttft"
        )
    gpu = _gpu(options, measured)
    link = _link(options, gpu, measured, config)
    between = None if options.between is None else links.between(options.between)
    if options.scale is not None:
        return _scale(options, config, gpu, link, between)
    devices = config.mesh.size if options.ttft is None else config.mesh.tp
    kernels = "jnp" if config.compression.backend == "jnp" else ""
    same = measured is not None and gpu.name in (measured["gpu"], getattr(hardware.find(measured["gpu"]), "name", ""))
    more = {"rails": options.rails, "kernels": kernels, "measured": measured if same else None}
    machine = Machine(gpu, link, devices, hosts=options.hosts, between=between, **more)
    forecast_of = lambda config: _first_token(options, config) if options.ttft else _steps(config)
    forecast = forecast_of(config)
    use = "training" if options.ttft is None else "first_token"
    result = run(forecast, machine, config, use, options)
    one_chain = None
    if config.chains == AUTO and result[0].chains > 1:
        one_chain = forecast_of(dataclasses.replace(config, chains=1))(machine, "none")
    if options.plot and (devices == 1 or not result[2]):
        raise ConfigError(f"--plot {options.plot}: nothing is sent in a codec here; set --mesh.tp, or leave it out")
    title, below = _title(options, config), {"notes": _notes(options, config, machine, result), "one_chain": one_chain}
    print(report.text(title, machine, *result, **below))
    if options.json:
        _write(options.json, report.as_json(title, machine, *result, **below))
    if options.plot:
        _draw(options, config, machine, [c.codecs for c in result[2]], forecast)
    return 0


def run(forecast: Callable[[Machine, str], Forecast], machine: Machine, config: TrainConfig, use: str,
        options: argparse.Namespace) -> tuple[Forecast, Forecast, list[Choice], Advice]:  # fmt: skip
    """(exact, the ceiling, each codec, the recommendation)."""
    exact, ceiling = forecast(machine, "none"), forecast(machine, "free")
    choices = []
    alone = use == "training" and config.mesh.tp == 1
    # What auto takes: at the first token another codec where sums take errors along.
    fed = use == "first_token" and _fed(machine, recommended.recommended(recommended.FEEDBACK)[0], config)
    auto = recommended.FEEDBACK if fed else use
    listed = _codecs(options.codecs or CODECS[use], config, use, auto, given=options.codecs is not None)
    if alone:
        listed = [_own(config)] if _sent_besides(config) else []
    elif use == "training" and config.compression.plan:
        listed = [PLAN, *listed]
    for codecs in listed:
        found = forecast(machine, codecs)
        fed = use == "first_token" and _fed(machine, codecs, config)
        loss = _own_loss(config) if alone else None if codecs == PLAN else record.of(codecs, use, feedback=fed)
        choices.append(Choice(codecs, found, exact.seconds / found.seconds, loss))
    limit = _limit(options.loss, use)
    best = advice.choose(choices, limit)
    of = best or max(choices, key=lambda c: c.speedup, default=None)
    least, most = None, 0.0
    if of is not None and machine.devices > 1:
        most = advice.most_gb_s(forecast, machine, of.codecs)
    if of is not None and config.mesh.tp > 1 and of.codecs != PLAN:
        codec, ranks = codec_pair(of.codecs)[0], config.mesh.tp
        sums = {"axis": "tp", "ranks": ranks, "elements": 1, "size": 2, "calls": 1, "per_token": config.model.d_model}
        sample = messages.SiteMessage("", "forward", "psum", codec=messages.as_codec(codec), **sums)
        in_kernels = config.compression.link not in ("nccl", "copy")
        least = advice.least_bytes(machine, sample, messages.as_codec(codec), nvlink=in_kernels)
    text = advice.describe(best, least, most, choices=choices, limit=limit, use=use)
    if not alone and config.mesh.tp > 1:
        text += advice.against_auto(best, auto)
    count = max(f.chains for f in (exact, *(c.forecast for c in choices)))
    parameters = Shard(config.model, 1).parameters(config.model.n_layers)
    sure = advice.sure(machine, use, config.mesh.tp, parameters, chains=count)
    if use == "training" and overlap(config)[0]:
        sure += ("assumed: gradients of a layer go beside the backward pass of another; nothing of it was measured",)
    return exact, ceiling, choices, Advice(best, least, most, text, sure)


def _sent_besides(config: TrainConfig) -> dict[str, str]:
    """Returns {use of the record: codecs} of what a run sends compressed but for the sums over tp."""
    sent, c = {}, config.data_parallel
    if config.mesh.pp > 1:
        sent["stages"] = f"{config.pipeline.forward}:{config.pipeline.backward}"
    if config.mesh.dp > 1:
        sent["gradients"] = c.gradients
        if c.zero1:
            sent["weights"] = c.parameters
    return {use: codecs for use, codecs in sent.items() if set(codecs.split(":")) - {"none", "bfloat16"}}


def _own(config: TrainConfig) -> str:
    """The name of what a run sends without tensor parallelism: gradients, weights and what stages send."""
    return ", ".join(f"{use} {codecs}" for use, codecs in _sent_besides(config).items())


def _own_loss(config: TrainConfig) -> record.Loss | None:
    """Returns the largest recorded change of those; None where one has no record."""
    losses = [record.of(codecs, use) for use, codecs in _sent_besides(config).items()]
    return None if None in losses else max(losses, key=lambda loss: loss.change, default=None)


def _steps(config: TrainConfig) -> Callable[[Machine, str], Forecast]:
    """The forecasts of a step: in the run's own plan (PLAN), or in codecs at all sites; without tensor parallelism,
    where these change nothing, of what else the run sends (`_own`)."""
    own = _own(config) if config.mesh.tp == 1 else PLAN
    bare = dataclasses.replace(config, compression=dataclasses.replace(config.compression, plan={}))

    def forecast(at: Machine, codecs: str) -> Forecast:
        found = predict.step(config, at) if codecs == own else predict.step(bare, at, codecs)
        return dataclasses.replace(found, codecs=codecs)

    return forecast


def _check(options: argparse.Namespace) -> None:
    for key, least in (("hosts", 1), ("rails", 1), ("batch", 1), ("per_host", 1), ("ttft", 1)):
        value = getattr(options, key)
        if value is not None and not least <= value <= 1 << 24:
            raise ConfigError(f"--{key.replace('_', '-')} {value}: must be at least {least} and at most {1 << 24}")
    needs = "--scale N..M" if options.scale is None else None
    for key, given, without in (
        ("between", options.between, options.hosts == 1 and needs and f"give --hosts 4, or {needs}"),
        ("per-host", options.per_host, needs and f"is of studies of many GPUs; give {needs}, or leave it out"),
        ("batch", options.batch, options.ttft is None and "is of prompts; give --ttft 8192, or leave it out"),
        ("hosts", None if options.hosts == 1 else options.hosts,
         options.scale is not None and "--scale has as many hosts as its GPUs take; say --per-host 8"),
        ("codecs", options.codecs, options.scale is not None and "--scale compares ways of its own; leave it out"),
        ("loss", options.loss, options.scale is not None and "--scale recommends nothing; leave it out"),
    ):  # fmt: skip
        if given is not None and without:
            raise ConfigError(f"--{key} {given}: {without}")
    if options.between is None and options.rails > 1:
        raise ConfigError(f"--rails {options.rails}: are cards between hosts; say what one carries, --between 100Gb/s")
    if options.scale and options.ttft:
        raise ConfigError(f"--ttft {options.ttft}: --scale is of training steps; leave one of them out")
    if options.plot:
        plot.check_path(options.plot, "--plot")
    if options.json and not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: there is no folder {options.json.parent}; make it first")
    if options.json and options.json.is_dir():
        raise ConfigError(f"--json {options.json}: is a folder; name a file")


def _asks_more(options: argparse.Namespace, rest: Sequence[str]) -> bool:
    return bool(options.model or options.ttft or options.scale or any(a.startswith("--config") for a in rest))


def _gpu(options: argparse.Namespace, measured: dict[str, Any] | None) -> hardware.Gpu:
    if options.gpu is not None:
        return hardware.gpu(options.gpu, options.gpu_tflops, options.gpu_memory)
    if measured is not None:
        known = hardware.find(measured["gpu"])
        # Of a device without a data sheet, such as the emulator's, all is what was measured.
        return known or hardware.gpu(measured["gpu"], measured["product_flops"] / 1e12, measured["copy_gb_s"])
    raise ConfigError(f"--gpu: name the GPU to forecast for, one of {', '.join(hardware.names())}")


def _link(options, gpu, measured, config) -> links.Link:
    if options.link is None:
        alone = (config.mesh.size if options.ttft is None else config.mesh.tp) == 1
        if not (alone or measured):
            raise ConfigError(f"--link: say what joins the GPUs: {links.EXAMPLES}")
        if not measured or not measured["link"]:
            return links.parse("host", gpu)
    return links.parse(options.link or "measured", gpu, measured)


def _model(path: str):
    """The shape of a Hugging Face folder, of which only config.json is read, of a .gguf file, or of a run."""
    from taco_jax.inference.loading import open_checkpoint
    from taco_jax.inference.model_folder import is_run, no_model, read_object
    from taco_jax.inference.run_folder import find
    from taco_jax.models.huggingface import config_from_hf

    folder = Path(path).expanduser()
    file = folder / "config.json"
    if folder.suffix == ".gguf" or find(folder) is not None or is_run(folder):
        return open_checkpoint(path).config
    if not file.is_file():
        raise ConfigError(f"--model {path}: {no_model(folder) or 'has no config.json'}")
    described = read_object(file)
    try:
        return config_from_hf(described)
    except KeyError as error:
        raise ConfigError(f"{file}: has no key {error}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


def _codecs(text: str, config: TrainConfig, use: str, auto: str, *, given: bool) -> list[str]:
    """The codecs to compare: those of --codecs, and those of the configuration. auto: the use that it stands for."""
    split = ";" if ";" in text or ("=" in text and "," in text) else ","
    names = [name.strip() for name in text.split(split) if name.strip()]
    if use == "training" and not given:
        own = (config.compression.forward, config.compression.backward)
        pair = own[0] if own[0] == own[1] else ":".join(own)
        names = names if pair in (*names, "none") else [pair, *names]
    for name in names:
        try:
            pair = codec_pair(name, "--codecs")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if pair == ("none", "none"):
            raise ConfigError("--codecs none: exact is always shown; name codecs that compress, such as int8h;int6h")
    named = lambda name: ":".join(map(recommended.resolved, name.split(":"), (auto, auto), ("forward", "backward")))
    return list(dict.fromkeys(map(named, names)))


def _fed(machine: Machine, codecs: str, config: TrainConfig) -> bool:
    """Returns whether inference takes errors along by itself (`first_token`)."""
    codec = messages.as_codec(codecs.partition(":")[0])
    return predict.feeds_back(machine, codec, config.mesh.tp, config.compression.link)


def _limit(text: str | None, use: str) -> float:
    if text is None:
        return LIMITS[use] or record.bound()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if match is None:
        raise ConfigError(f"--loss {text!r}: must be a share in percent, such as 0.5%")
    return float(match[1]) / 100


def _first_token(options: argparse.Namespace, config: TrainConfig) -> Callable[[Machine, str], Forecast]:
    given = {"tp": config.mesh.tp, "length": options.ttft, "batch": options.batch or 1}
    given |= {"min_bytes": config.compression.min_bytes, "link": config.compression.link, "chains": config.chains}
    return lambda at, codecs: predict.first_token(config.model, at, codecs, **given)


def _title(options: argparse.Namespace, config: TrainConfig) -> str:
    mesh = config.mesh
    if options.ttft is not None:
        return f"time to the first token of {options.batch or 1} x {options.ttft:,} tokens, tp {mesh.tp}"
    return f"training step of {predict.tokens_of(config):,} tokens, dp {mesh.dp} x pp {mesh.pp} x tp {mesh.tp}"


def _notes(options: argparse.Namespace, config: TrainConfig, machine: Machine, result: tuple) -> list[str]:
    """Returns what the table needs to be read: the model, whether it fits, and what is sent beside the sums over tp."""
    model = config.model
    billions = Shard(model, 1).parameters(model.n_layers) / 1e9
    notes = [
        f"model: {model.n_layers} layers x {model.d_model}, {billions:.3g}B parameters; fewer bytes: than as bf16, "
        "whatever has another type"
    ]
    if options.ttft is None:
        held = scale.memory_bytes(config) / 1e9
    else:
        held = scale.prompt_bytes(model, config.mesh.tp, (options.batch or 1) * options.ttft) / 1e9
    if machine.gpu.memory_gb and held > machine.gpu.memory_gb:
        notes.append(
            f"does not fit: about {held:.3g} GB on each GPU, which has {machine.gpu.memory_gb:g} GB "
            f"(an estimate; {'--dry-run of the trainer asks XLA' if options.ttft is None else 'try more --mesh.tp'})"
        )
    if options.ttft is None and config.mesh.tp > 1 and (besides := _sent_besides(config)):
        said = ", ".join(f"{use} {codecs}" for use, codecs in besides.items())
        notes.append(f"every way but exact also has the configuration's {said}")
    return notes


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from None


def _draw(options, config: TrainConfig, machine: Machine, codecs: Sequence[str], forecast) -> None:
    """Draws over speeds and tokens: of the prompt; of shorter sequences and of larger batches."""
    if options.ttft is not None:
        shapes = [n for n in (1 << k for k in range(7, 18)) if n <= config.model.max_length]
        shapes = sorted({*shapes, options.ttft})
        at, tokens = shapes.index(options.ttft), [n * (options.batch or 1) for n in shapes]
        by_shape = [_first_token(argparse.Namespace(ttft=n, batch=options.batch), config) for n in shapes]
    else:
        shorter = [config.data.sequence_length // k for k in (64, 16, 4)]
        cut = [dataclasses.replace(config.data, sequence_length=n) for n in shorter if n >= max(16, config.mesh.tp)]
        made = [dataclasses.replace(config, data=data) for data in cut]
        at = len(made)
        made += [dataclasses.replace(config, global_batch=config.global_batch * k) for k in (1, 4, 16)]
        tokens = [predict.tokens_of(c) for c in made]
        by_shape = [_steps(c) for c in made]
    outside = machine.hosts > 1

    def at_speed(gb_s: float) -> Machine:
        changed = {"between": machine.between.at(gb_s)} if outside else {"link": machine.link.at(gb_s)}
        return dataclasses.replace(machine, **changed)

    exact: dict[tuple[float, int], float] = {}

    def speedup(gb_s: float, codec: str, index: int) -> float:
        if (gb_s, index) not in exact:
            exact[gb_s, index] = by_shape[index](at_speed(gb_s), "none").seconds
        return exact[gb_s, index] / by_shape[index](at_speed(gb_s), codec).seconds

    here = (machine.between if outside else machine.link).gb_s(2)
    plot.draw(options.plot, _title(options, config), codecs, speedup, tokens=tokens, here=here, at=at)


def _scale(options, config: TrainConfig, gpu: hardware.Gpu, link: links.Link, between: links.Link | None) -> int:
    numbers = scale.counts(options.scale)
    if between is None:
        raise ConfigError(f"--scale {options.scale}: say what joins the hosts, --between 100Gb/s")
    rails, per_host = options.rails, options.per_host or scale.PER_HOST
    if odd := [n for n in numbers if n > per_host and n % per_host]:
        raise ConfigError(
            f"--scale {options.scale}: {odd[0]} GPUs are no whole number of hosts of {per_host} GPUs; begin with "
            f"{per_host}, or set --per-host"
        )
    points = scale.study(config, gpu, link, between, gpus=numbers, per_host=per_host, rails=rails)
    if not points:
        raise ConfigError(
            f"--scale {options.scale}: the model's state fits on none of these numbers of {gpu.name} "
            f"({gpu.memory_gb:g} GB each); try more GPUs"
        )
    title = (
        f"{gpu.name}, {per_host} on a host over {link.name}, {rails} x {between.name} between hosts; "
        f"tokens of a GPU stay the same, layers go in one chain"
    )
    print(report.scale_text(title, points))
    if options.json:
        ways = dict.fromkeys(p.way for p in points if p.way != "none")
        pays = {way: {"words": report.where(points, way), "from_to": scale.stops(points, way)} for way in ways}
        _write(options.json, {"what": title, "points": [dataclasses.asdict(p) for p in points], "pays": pays})
    if options.plot:
        plot.draw_scale(options.plot, {f"{gpu.name}, {between.name}": points})
    return 0


def _measured_text(found: dict[str, Any], path: Path) -> str:
    lines = [
        f"measured on {found['hardware']}",
        f"  product    {found['product_flops'] / 1e12:.3g} TFLOP/s of bf16",
        f"  copy       {found['copy_gb_s']:.4g} GB/s, read and written",
        *(
            [f"  starts     {found['start_us']:.3g} us a kernel, {found['host_us']:.3g} us a program from the host"]
            if "start_us" in found
            else []
        ),
        f"  codec      {measure.CODEC} encodes at {100 * found['codec_share']:.0f} % of that",
    ]
    if found["link"]:
        exact, hop = found["link"]["exact"], found["link"]["hop"]
        lines.append(f"  sums       {exact['us']:.3g} us + bytes / {exact['gb_s']:.3g} GB/s, {found['ranks']} ranks")
        lines.append(f"  exchange   {hop['us']:.3g} us + bytes / {hop['gb_s']:.3g} GB/s")
        if kernel := found["link"]["kernel"]:
            per_value = f"{kernel['ns'] * 1e3:.3g} ps for each value"
            lines.append(f"  one kernel {kernel['us']:.3g} us + bytes / {kernel['gb_s']:.3g} GB/s + {per_value}")
    return "\n".join([*lines, f"written to {path}"])


__all__ = ["main", "run"]
