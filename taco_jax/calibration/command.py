"""`python -m taco_jax.calibrate`: measures a model's messages and writes the plan of least predicted loss.

Its own flags are below; every other flag is one of `python -m taco_jax.train`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from taco_jax.codec import as_codec
from taco_jax.compression import plan_file
from taco_jax.compression.plan_file import PlanFile
from taco_jax.config import ConfigError, LoraConfig, MeshConfig, TrainConfig, cli
from taco_jax.config.derived import microbatch, sequence_parallel
from taco_jax.errors import check_writable

PROGRAM = "python -m taco_jax.calibrate"
USES = ("training", "first_token")
DESCRIPTION = """Measure a model's messages on some batches, and write the plan that costs least under a budget.

  python -m taco_jax.calibrate --config experiments/quickstart.py --bits 5 --out plan.json
  python -m taco_jax.calibrate --model HF_FOLDER --data text.txt --mesh.tp 4 --bits 4.5 --out plan.json
  python -m taco_jax.calibrate --model model.gguf --data text.txt --mesh.tp 4 --loss 0.5% --out plan.json
  python -m taco_jax.calibrate --config FILE --model runs/x --time 80% --gpu L4 --link host --out plan.json

Prints what was measured at every site and direction, the codec of each, and what they are predicted to cost; draws it
beside the plan (plan.png). The trainer takes the file by --compression.plan plan.json, generate, evaluate and serve by
--compression plan.json (docs/plans.md). Every flag of python -m taco_jax.train is taken too."""
SHORTEST = 8


def _parser() -> cli.Parser:
    parser = cli.Parser(prog=PROGRAM, description=DESCRIPTION)
    add = parser.add_argument
    add("--model", default=None, help="weights: Hugging Face folder, .gguf file or run (runs/x[@STEP])")
    add("--data", default=None, help="text or token files to run on; default: data.train of the configuration")
    add("--out", type=Path, default=None, help="the plan's file, .json")
    add("--bits", type=float, default=None, help="budget: average bits of an element over all messages")
    add("--time", default=None, help="budget: of a step or to the first token, 12.5ms, or 80%% of the exact one's time")
    add("--loss", default=None, help="budget: rise of the loss (first_token: of the perplexity), such as 0.2%%")
    add("--use", choices=USES, default=None, help="what for; default: first_token with --model alone, else training")
    add("--codecs", default=None, help="candidates, separated by semicolons: 'int4h;int4h,block=32;int8h'")
    add("--feedback", choices=("on", "off"), default=None, help="error feedback of forward sums; default: as the use")
    add("--by", choices=("layer", "kind"), default=None, help="a codec for each layer, or for all layers' like sites")
    add("--arrange", action="store_true", help="first learn an order of the residual channels (with first_token)")
    add("--tokens", type=int, default=4096, help="tokens to measure on")
    add("--length", type=int, default=None, help="tokens of a sequence; default: 512, or data.sequence_length")
    add("--steps", type=int, default=100, help="steps to train first where a configuration has no weights yet")
    add("--dtype", default="float32", help="type of activations, with first_token")
    add("--gpu", default=None, help="GPU of the forecast, with --time (python -m taco_jax.advise)")
    add("--link", default=None, help="what joins the GPUs, with --time")
    add("--ttft", type=int, default=None, help="tokens of the prompt whose first token --time is about")
    return parser


@dataclasses.dataclass(frozen=True)
class Budget:
    """kind: bits, time or loss. value: bits of an element; seconds, or with `share` a share of the exact time; a
    fraction of the loss. text: as given."""

    kind: str
    value: float
    text: str
    share: bool = False


def main(arguments: Sequence[str]) -> int:
    options, rest = _parser().parse_known_args(list(arguments))
    budget = _budget(options)
    _check(options)
    has_config = any(arg.partition("=")[0] == "--config" for arg in rest)
    config = cli.parse(rest, prog=PROGRAM)
    use = options.use or ("first_token" if options.model and not has_config else "training")
    if use == "training" and options.by == "layer":
        raise ConfigError("--by layer: the trainer's layers are one scanned program, which sends alike; use --by kind")
    if use == "training" and options.arrange:
        raise ConfigError("--arrange: is of inference, which folds orders into weights as it reads them; leave it out")
    if options.model is None and not has_config:
        raise ConfigError("--config, --model: say what to measure, an experiment file or a model's weights")
    if config.mesh.tp == 1:
        raise ConfigError("mesh.tp=1: one device sends nothing; set --mesh.tp (and --devices cpu:N)")
    forecast = _machine(options, config, use) if budget.kind == "time" else None
    check_writable("--out", options.out)
    cli.select_devices(config.devices)
    cli.devices(config.devices)
    made = {"command": f"{PROGRAM} {shlex.join(arguments)}", "use": use, "budget": budget.text}
    subject = open_subject(options, config, use, has_config=has_config)
    plan, lines = calibrate(subject, options, budget, made, forecast)
    plan_file.write(plan, options.out)
    for line in lines:
        cli.say(line)
    picture = options.out.with_suffix(".png")
    from taco_jax.calibration import plot

    try:
        plot.draw(picture, plan)
        cli.say(f"plan {options.out}; picture {picture}")
    except (ImportError, OSError) as error:
        cli.say(f"plan {options.out}; no picture ({error})")
    return 0


def _budget(options: argparse.Namespace) -> Budget:
    given = [key for key in ("bits", "time", "loss") if getattr(options, key) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{key}" for key in given) or "none"
        raise ConfigError(f"--bits, --time, --loss: give one budget ({found} given), such as --bits 4.5 or --loss 0.2%")
    if options.bits is not None:
        if not 0 < options.bits <= 32:
            raise ConfigError(f"--bits {options.bits:g}: must be above 0 and at most 32, such as 4.5")
        return Budget("bits", options.bits, f"{options.bits:g} bits")
    if options.loss is not None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", options.loss)
        if match is None:
            raise ConfigError(f"--loss {options.loss!r}: must be a share in percent, such as 0.2%")
        return Budget("loss", float(match[1]) / 100, f"{options.loss} loss")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|%|)", options.time)
    if match is None or not float(match[1]):
        raise ConfigError(f"--time {options.time!r}: must be milliseconds or a share, such as 12.5ms or 80%")
    if match[2] == "%":
        return Budget("time", float(match[1]) / 100, f"{options.time} of the exact time", share=True)
    return Budget("time", float(match[1]) / 1e3, f"{match[1]} ms")


def _check(options: argparse.Namespace) -> None:
    for key, least in (("tokens", 1), ("length", SHORTEST), ("steps", 1), ("ttft", 1)):
        value = getattr(options, key)
        if value is not None and not least <= value <= 1 << 24:
            raise ConfigError(f"--{key} {value}: must be at least {least} and at most {1 << 24}")
    if options.out is None or not plan_file.is_plan_path(str(options.out)):
        raise ConfigError(f"--out {options.out}: is needed and must end with .json, for example --out plan.json")
    from taco_jax.inference.settings import DTYPES

    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype}: must be one of {', '.join(DTYPES)}")
    for codec in candidates(options):
        try:
            found = as_codec(codec, "--codecs")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        rule = ""
        if found.exact:
            rule = "exact messages are always among the candidates; leave it out"
        elif found.per_token or found.rounding == "stochastic":
            rule = "has blocks of tokens or random rounding, which sums of layers cannot have; leave it out"
        if rule:
            raise ConfigError(f"--codecs {codec}: {rule}")


def candidates(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the codecs to choose from."""
    from taco_jax.calibration.plans import CANDIDATES

    if options.codecs is None:
        return CANDIDATES
    return tuple(dict.fromkeys(name.strip() for name in options.codecs.split(";") if name.strip()))


# The model


@dataclasses.dataclass(frozen=True)
class Subject:
    """A `measure.Model`, and how it is measured. sites: those to measure, of the model's. length: of
    sequences. elements: of a message where the plan will be used. read: the batches."""

    model: Any
    use: str
    sites: tuple[str, ...]
    tokenizer: Any
    feedback: bool
    by_layer: bool
    data: str
    length: int
    elements: int
    read: Sequence[Any] = ()


def open_subject(options: argparse.Namespace, config: TrainConfig, use: str, *, has_config: bool) -> Subject:
    """Returns the model with its weights on the mesh, and how it is measured.

    Raises:
      ConfigError: what cannot be opened, does not fit, or contradicts each other.
    """
    from taco_jax.inference.loading import load_params, open_checkpoint
    from taco_jax.mesh import make_mesh
    from taco_jax.models.config import validate

    source = options.model or config.init_from or _own_run(config, has_config)
    checkpoint = None if source is None else open_checkpoint(source)
    if checkpoint is not None:
        if has_config and config.init_from is None:
            _same_shape(config.model, checkpoint.config, source)
        config = dataclasses.replace(config, model=checkpoint.config)
    try:
        validate(config.model, config.mesh.tp)
        mesh = make_mesh(tp=config.mesh.tp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    data = options.data or (" ".join(config.data.train) if isinstance(config.data.train, tuple) else config.data.train)
    if options.data is None and not has_config:
        raise ConfigError("--data: is needed, the text or token files to run the model on")
    if options.data is None and isinstance(config.data.train, tuple):
        raise ConfigError(f"--data: name one source to measure on; the configuration has {data}")
    length = options.length or (config.data.sequence_length if has_config else min(512, config.model.max_length))
    if length > config.model.max_length:
        raise ConfigError(f"--length {length}: the model's longest sequence has {config.model.max_length} tokens")
    training = use == "training"
    elements = (microbatch(config) if training else 1) * length * config.model.d_model
    config = _alone(config, length)
    # Data that cannot be read must not be found out after a training.
    tokenizer = None if checkpoint is None else checkpoint.tokenizer
    from taco_jax.calibration.batches import batches

    read = batches(data, vocab_size=config.model.vocab_size, tokenizer=tokenizer, length=length, tokens=options.tokens)
    if training:
        parallel, params = _trainers(config, mesh, checkpoint, options.steps)
    else:
        if checkpoint is None:
            raise ConfigError("--use first_token: needs weights; give them with --model")
        parallel, params = _inferences(config.model, mesh, options.dtype), load_params(checkpoint, mesh, options.dtype)
    from taco_jax.calibration.measure import Model
    from taco_jax.inference.settings import ROWS
    from taco_jax.models import decoder

    can = not (parallel.sequence_parallel or config.model.post_norms)
    wanted = options.feedback == "on" if options.feedback else not training or config.compression.error_feedback
    if options.feedback == "on" and not can:
        raise ConfigError(
            "--feedback on: needs whole sequences and sums that are not normalised; leave it out "
            f"(sequence_parallel={parallel.sequence_parallel}, model.post_norms={config.model.post_norms})"
        )
    sites = decoder.site_names(config.model, config.mesh.tp) if training else tuple(f"layers/{row}" for row in ROWS)
    by = options.by or ("kind" if training else "layer")
    model = Model(config.model, params, mesh, parallel)
    return Subject(
        model, use, sites, tokenizer, feedback=wanted and can, by_layer=by == "layer", data=data, length=length,
        elements=elements, read=read,
    )  # fmt: skip


def _own_run(config: TrainConfig, has_config: bool) -> str | None:
    """The configuration's own workdir, where it has a checkpoint."""
    folder = Path(config.workdir) / "checkpoints"
    return config.workdir if has_config and config.workdir and folder.is_dir() and any(folder.iterdir()) else None


def _same_shape(ours, theirs, source: str) -> None:
    a, b = plan_file.shape_of(ours), plan_file.shape_of(theirs)
    for key in a:
        if a[key] != b[key]:
            raise ConfigError(
                f"--model {source}: has {key}={b[key]!r} and the configuration {a[key]!r}; give the configuration of "
                "this model, or leave --config out"
            )


def _alone(config: TrainConfig, length: int) -> TrainConfig:
    """The config for one tensor-parallel group, in which nothing else is sent, and with sums of whole batches."""
    sharded = sequence_parallel(config)[0]
    return dataclasses.replace(
        config,
        mesh=MeshConfig(tp=config.mesh.tp),
        lora=LoraConfig(),
        data=dataclasses.replace(config.data, sequence_length=length),
        compression=dataclasses.replace(config.compression, plan={}, with_product=False, min_bytes=0),
        accumulation=1,
        chains=1,
        sequence_parallel=sharded,
        global_batch=max(1, config.global_batch // (config.mesh.dp * config.accumulation)),
        init_from=None,
        init_optimizer=False,
        profile=None,
        stop_after=None,
    )


def _trainers(config: TrainConfig, mesh, checkpoint, steps: int) -> tuple[Any, Any]:
    """(how the trainer runs the model, float32 parameters), after some steps where there is no checkpoint."""
    import jax

    from taco_jax import data
    from taco_jax.config.checks import check
    from taco_jax.inference.loading import load_params
    from taco_jax.train.step import build

    program = build(check(config), mesh)
    if checkpoint is not None:
        return program.parallel, load_params(checkpoint, mesh, "float32")
    training, _ = data.open_data(config.data, config.model.vocab_size)
    source, state = data.batches(config, training), program.init(jax.random.key(config.seed))
    out = None
    for _ in range(steps):
        batch = data.device_batch({"tokens": next(source)}, program.batch_sharding)
        state, out = program.step(state, batch)
    cli.say(f"no weights yet: trained {steps} steps first, to a loss of {float(out['loss']):.3f}")
    return program.parallel, state.params


def _inferences(model, mesh, dtype: str):
    """How inference runs the model."""
    from taco_jax.inference.settings import Settings

    layout = Settings(mesh.shape["tp"], dtype=dtype).layout(model, mesh.devices.flat[0], decoding=False)
    return layout.par


# The plan


def calibrate(subject: Subject, options: argparse.Namespace, budget: Budget, made: Mapping[str, Any],
              forecast: Callable | None = None) -> tuple[PlanFile, list[str]]:  # fmt: skip
    """Returns the plan, and the lines that the command prints.

    Raises:
      ConfigError: data or a budget that cannot be met; it names the nearest that can.
    """
    from taco_jax.calibration.measure import REFERENCE, measure

    model, training, read = subject.model, subject.use == "training", subject.read
    codecs = candidates(options)
    if budget.kind == "bits":
        _check_bits(budget.value, codecs, subject.elements)
    arrangement = None
    if options.arrange:
        arrangement, model = _arranged(model, read, subject.feedback)
    measured_codecs = codecs if not training or REFERENCE in codecs else (*codecs, REFERENCE)
    try:
        measured, loss = measure(
            model, read, measured_codecs, sites=subject.sites, feedback=subject.feedback, gradients=training,
            exponent=None if training else 0, say=cli.say,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(str(error)) from None
    made = _made(made, subject, read)
    plan, lines = plan_of(measured, loss, subject, budget, codecs, forecast=forecast, made=made)
    return dataclasses.replace(plan, arrangement=arrangement), lines


def _arranged(model: Any, read: Sequence[Any], feedback: bool) -> tuple[dict[str, Any] | None, Any]:
    """Returns (a plan's arrangement, learned on these batches, the model with it folded in), or (None, the model) where
    no order is worth it."""
    import numpy as np

    from taco_jax.calibration import arrangement
    from taco_jax.models.arrangement import fold

    sites = arrangement.measure(model.config, model.mesh, model.params, np.concatenate(read))
    pairs = sites.pairs_fed if feedback else sites.pairs
    order = arrangement.learn(pairs)
    ratio = arrangement.cost(order, pairs) / arrangement.cost(range(len(order)), pairs)
    cli.say(f"order of the residual channels: predicted to lose {ratio:.2f} of what the stored one loses")
    if ratio > 1 - arrangement.LEAST_GAIN:
        cli.say(f"it is left as stored: another must take at least {arrangement.LEAST_GAIN:.0%} away")
        return None, model
    folded = dataclasses.replace(model, params=fold(model.params, order, model.config))
    return {"order": [int(channel) for channel in order], "predicted": ratio}, folded


def _made(made: Mapping[str, Any], subject: Subject, read: Sequence[Any]) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        ours = version("taco-jax")
    except PackageNotFoundError:
        ours = "unknown"
    tokens = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in read)
    date = datetime.date.today().isoformat()
    return dict(made) | {"taco_jax": ours, "date": date, "data": subject.data, "tokens": tokens}


def plan_of(measured: Mapping, loss: float, subject: Subject, budget: Budget, codecs: Sequence[str],
            *, forecast: Callable | None, made: Mapping[str, Any]) -> tuple[PlanFile, list[str]]:  # fmt: skip
    """Returns the plan of what was measured, and the lines that the command prints."""
    import numpy as np

    from taco_jax.calibration import allocation, plans, report
    from taco_jax.inference.settings import ROWS

    training, model = subject.use == "training", subject.model.config
    found = plans.by_layer(measured) if subject.by_layer else dict(measured)
    delivered = set()
    if not training:
        # Inference adds what the last sum lost exactly.
        delivered = {f"layers/{model.n_layers - 1}/mlp/down"} if subject.by_layer else set()
    size = None if forecast is None else forecast(found, subject, codecs)
    messages = plans.messages_of(
        found,
        codecs,
        elements=subject.elements,
        feedback=subject.feedback,
        delivered=frozenset(delivered),
        size=None if size is None else size[0],
    )
    values = subject.elements * sum(max(1, s.layers) for s in found.values())
    if budget.kind == "bits":
        _check_bits(budget.value, codecs, subject.elements)
        chosen = allocation.within_size(messages, budget.value * values)
    elif budget.kind == "loss":
        bound = loss * budget.value if training else float(np.log1p(budget.value))
        chosen = allocation.within_cost(messages, bound)
    else:
        chosen = _in_time(messages, budget, size)
    choices = plans.chosen(messages, chosen, found, subject.elements)
    sites = [f"layers/{i}/{row}" for i in range(model.n_layers) for row in ROWS] if subject.by_layer else subject.sites
    result = {"loss": loss, "predicted_rise": sum(c.option.cost for c in choices), "bits": plans.average_bits(choices)}
    plan = PlanFile(
        plans.site_plans(choices, list(sites)),
        {"shape": plan_file.shape_of(model), "sites": list(sites)},
        dict(made) | result,
    )
    return plan, report.lines(plan, subject.use)


def _check_bits(budget: float, codecs: Sequence[str], elements: int) -> None:
    """Raises ConfigError where even the smallest codec has more bits, before anything is measured."""
    from taco_jax.calibration.plans import bits_of

    by_codec = {codec: bits_of(codec, elements) for codec in (*codecs, "none")}
    codec = min(by_codec, key=by_codec.get)
    if by_codec[codec] > budget:
        raise ConfigError(
            f"--bits {budget:g}: no choice of codecs has so few; the least is {by_codec[codec]:.4g} bits, "
            f"everything in {codec}"
        )


def _in_time(messages, budget: Budget, size) -> list:
    from taco_jax.calibration import allocation

    _, others, exact = size
    limit = budget.value * exact if budget.share else budget.value
    least = others + allocation.cheapest(messages)
    if least > limit:
        raise ConfigError(
            f"--time {budget.text}: no choice of codecs is so fast; the least is {1e3 * least:.4g} ms, "
            f"{least / exact:.1%} of the exact {1e3 * exact:.4g} ms"
        )
    return allocation.within_size(messages, limit - others)


def _machine(options: argparse.Namespace, config: TrainConfig, use: str) -> Callable:
    """Returns f(measured, subject, codecs) -> (size of (site, direction, codec) in seconds, seconds of the rest,
    seconds with exact messages)."""
    from taco_jax.forecast import hardware, links
    from taco_jax.forecast.cost import Machine

    if options.gpu is None or options.link is None:
        raise ConfigError("--time: needs --gpu and --link, what it is forecast for, such as --gpu L4 --link host")
    gpu = hardware.gpu(options.gpu, None, None)
    machine = Machine(gpu, links.parse(options.link, gpu), config.mesh.size if use == "training" else config.mesh.tp)
    from taco_jax.calibration import times

    return lambda measured, subject, codecs: times.of(machine, config, subject, measured, codecs, length=options.ttft)
