"""The program behind `python -m taco_jax.evaluate perplexity`: the loss of a model on a text, exact and compressed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from taco_jax.codec import AUTO
from taco_jax.config import ConfigError, cli
from taco_jax.errors import did_you_mean
from taco_jax.inference.flags import compression_of

DESCRIPTION = """The loss of a model on a text, exact and with the sums over devices compressed.

Prints loss and perplexity, their change against the exact model with its standard error (both paired token by token),
wire bits per element and SNR of each site, and how often both hold the same token most likely."""

CONTEXT = 1024
"""Tokens of a window of a model that can read so many."""


@dataclasses.dataclass(frozen=True)
class PerplexityConfig:
    """The loss of a model on a text, exact and compressed."""

    model: str = ""
    """Hugging Face folder or .gguf (docs/inference.md has the families), or a run: runs/x (latest step), runs/x@9."""
    text: str = ""
    """Text file (UTF-8)."""
    codec: tuple[str, ...] = ("none",)
    """Codecs of the sums over devices: mxfp4, int8h... (docs/codecs.md), fields after commas: int4h,block=32."""
    plan: dict[str, str] = dataclasses.field(default_factory=dict)
    """Codecs of single sites, before codec: pairs PATTERN CODEC such as layers/mlp/down int8h."""
    tp: int = 1
    """Tensor-parallel devices; with one there is nothing to compress."""
    context: int | None = None
    """Tokens of a window; windows do not overlap. None: 1024, or the model's longest sequence if that is shorter."""
    max_tokens: int | None = None
    """Predict at most so many tokens, from the start of the text; None takes the whole text."""
    min_bytes: int = 0
    """Messages below this many bytes are sent exactly; 0 compresses all of them."""
    error_feedback: bool | None = None
    """Each sum takes along what the one before it lost; None: codecs below 8 bits do, unless over NVLink kernels."""
    dtype: str = "float32"
    """Type of weights and activations: bfloat16, float32 or float16."""
    devices: str | None = None
    """'cpu:4' emulates four devices on the CPU; 'cpu', 'gpu' or None take what JAX finds."""
    json: str | None = None
    """File to write the results to, as JSON."""


def main(args: Sequence[str]) -> int:
    command, *rest = args or [""]
    if command in ("-h", "--help"):
        print(f"python -m taco_jax.evaluate perplexity [options]; perplexity --help lists them\n\n{DESCRIPTION}")
        return 0
    if not command:
        raise ConfigError("perplexity: is needed, for example python -m taco_jax.evaluate perplexity --help")
    if command != "perplexity":
        raise ConfigError(f"{command!r}: no evaluation of that name; {did_you_mean(command, ['perplexity'])}")
    prog = "python -m taco_jax.evaluate perplexity"
    config = cli.parse_flags(PerplexityConfig(), rest, prog=prog, description=DESCRIPTION)
    for key, example in (("model", "path/to/model"), ("text", "book.txt"), ("codec", "mxfp4 int8h")):
        if not getattr(config, key):
            raise ConfigError(f"--{key}: is needed, for example --{key} {example}")
    for key in ("context", "max_tokens"):
        if getattr(config, key) is not None and getattr(config, key) < 1:
            raise ConfigError(f"{key}={getattr(config, key)}: must be at least 1")
    if config.json and not Path(config.json).absolute().parent.is_dir():
        raise ConfigError(f"json={config.json}: cannot be written (its folder does not exist); make the folder first")
    cli.select_devices(config.devices)
    cli.devices(config.devices)
    results = perplexity(config)
    if config.json:
        try:
            Path(config.json).write_text(json.dumps(results, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"json={config.json}: cannot be written ({error.strerror})") from None
    return 0


def perplexity(config: PerplexityConfig) -> dict[str, dict]:
    """{codec: what was measured}, "none" first; prints each as it comes.

    Raises:
      ConfigError: model, text or settings cannot be used.
    """
    from taco_jax.inference.loading import load_params, open_checkpoint
    from taco_jax.inference.perplexity import Evaluation
    from taco_jax.inference.sampling import why_not_finite
    from taco_jax.inference.settings import Settings
    from taco_jax.inference.text import missing_tokenizer
    from taco_jax.mesh import make_mesh
    from taco_jax.models.arrangement import fold

    checkpoint = open_checkpoint(config.model)
    if checkpoint.tokenizer is None:
        raise ConfigError(missing_tokenizer(checkpoint.path))
    longest = checkpoint.config.max_length
    context = min(CONTEXT, longest) if config.context is None else config.context
    if context > longest:
        raise ConfigError(f"context={context}: the model's longest sequence has {longest}; use at most that")
    if config.tp == 1 and set(config.codec) != {"none"}:
        raise ConfigError(f"codec={' '.join(config.codec)}: one device sends nothing; set --tp (and --devices cpu:N)")
    ids = checkpoint.tokenizer.encode(_read(config.text))
    ids = ids if config.max_tokens is None else ids[: config.max_tokens + 1]
    if len(ids) < 2:
        raise ConfigError(f"text={config.text}: has {len(ids)} tokens; at least two are needed")
    settings = {"none": Settings(config.tp, dtype=config.dtype)} | {
        codec: Settings(config.tp, compression_of(config, codec, "codec"), config.plan, config.dtype)
        for codec in config.codec
    }
    try:
        mesh = make_mesh(tp=config.tp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    layout = lambda each: each.layout(checkpoint.config, mesh.devices.flat[0], decoding=False)
    # Raises before minutes of reading. What auto stands for is said by its name.
    settings = {_name(codec, layout(each)): each for codec, each in settings.items()}
    feedback = {codec: layout(each).error_feedback for codec, each in settings.items()}
    params = load_params(checkpoint, mesh, config.dtype)
    evaluation = Evaluation(checkpoint.config, mesh, params, ids, context)
    where = f"context {context}, tp {config.tp}, {config.dtype}"
    cli.say(f"{len(ids) - 1} tokens of {config.text}, {where}")
    results, exact = {}, None
    for codec, each in settings.items():
        evaluation.params = params if each.order is None else fold(params, each.order, checkpoint.config)
        score = evaluation.score(each)
        if exact is None and not math.isfinite(score.loss):
            raise ConfigError(f"--model {config.model}: {why_not_finite(config.dtype)}")
        exact = exact or score
        results[codec] = describe(score, exact) | {"error_feedback": feedback[codec]}
        cli.say(line(codec, results[codec]))
    return results


def _name(codec: str, layout) -> str:
    return layout.codecs.removesuffix(" with error feedback") if codec == AUTO else codec


def describe(score, exact) -> dict:
    """Returns what is kept of a codec's Score."""
    sites = {
        site: {
            "bits": bits,
            "snr_db": score.snr_db(site),
            "snr_db_by_layer": [score.snr_db(site, layer) for layer in range(len(score.power[site]))],
        }
        for site, bits in score.bits.items()
        if score.snr_db(site) is not None
    }
    counted = {"loss": score.loss, "perplexity": score.perplexity, "tokens": int(score.nll.size)}
    if sites:
        counted |= {"ratio": score.bf16 / score.sent}
    return counted | score.against(exact) | {"sites": sites}


def line(codec: str, result: dict) -> str:
    """One codec in one line."""
    text = f"{codec}: loss {result['loss']:.4f}, perplexity {result['perplexity']:.3f}"
    if not result["sites"]:
        return text
    text += f" ({result['change']:+.2%} +- {result['error']:.2%}), same token {result['agreement']:.2%}, "
    text += f"{result['ratio']:.2f} times fewer bytes than bf16"
    text += " with error feedback" if result.get("error_feedback") else ""
    for site, measured in result["sites"].items():
        text += f"; {site} {measured['bits']:.2f} bits, SNR {measured['snr_db']:.1f} dB"
    return text


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"text={path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"text={path}: is no UTF-8 text (byte {error.start})") from None
