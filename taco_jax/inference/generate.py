"""The program behind `python -m taco_jax.generate`: prompts on the command line, text on stdout as it comes.

What is not text (times, what was sent) goes to stderr, so that stdout can be used.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from taco_jax.config import ConfigError, cli
from taco_jax.inference.flags import ModelFlags

DESCRIPTION = """Go on with prompts, with compressed tensor parallelism.

--prompt takes one prompt or several; several are one batch, and each text is printed when it is whole."""


@dataclasses.dataclass(frozen=True)
class GenerateConfig(ModelFlags):
    """Go on with prompts."""

    prompt: tuple[str, ...] = ()
    """Text to go on with; several texts are one batch."""
    prompt_ids: tuple[str, ...] = ()
    """Token ids to go on with, in the place of --prompt: '5 17 200'. Several are one batch. Prints ids."""
    max_tokens: int = 128
    """Tokens after which a text ends at the latest."""
    temperature: float = 0.0
    """0 takes the most likely token; else logits are divided by it and a token is drawn."""
    top_k: int = 0
    """Draw among the so many most likely tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest most likely tokens that have at least this probability together."""
    seed: int = 0
    """Seed of what is drawn; prompt number n draws with seed + n."""
    ignore_eos: bool = False
    """Go on after a token that ends the text."""
    chains: int | None = None
    """Parts of a long prompt side by side in each layer: one sends while another computes; None: 2 on a slow link."""


def main(args: Sequence[str]) -> int:
    config = cli.parse_flags(GenerateConfig(), args, prog="python -m taco_jax.generate", description=DESCRIPTION)
    for key in ("model", "prompt"):
        if not getattr(config, key) and not (key == "prompt" and config.prompt_ids):
            example = {"model": "--model path/to/model", "prompt": '--prompt "Once upon a time"'}[key]
            raise ConfigError(f"--{key}: is needed, for example {example}")
    prompts = config.prompt if not config.prompt_ids else _ids(config)
    cli.select_devices(config.devices, in_order=config.in_order)
    # Imported here: errors in the settings then come before the seconds that these imports take.
    from taco_jax.inference.sampling import Sampling

    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    cli.devices(config.devices)
    generator = config.generator()
    if config.tp > 1:
        cli.say(f"codecs: tp {generator.programs.codecs}", sys.stderr)
    tokens = generator.generate(prompts, max_tokens=config.max_tokens, sampling=sampling, ignore_eos=config.ignore_eos)
    if config.prompt_ids:
        _print((token._replace(text=f" {token.id}") for token in tokens), [" ".join(map(str, ids)) for ids in prompts])
    else:
        _print(tokens, config.prompt)
    cli.say(report(generator), sys.stderr)
    return 0


def _ids(config: GenerateConfig) -> list[list[int]]:
    """The prompts of --prompt-ids."""
    if config.prompt:
        raise ConfigError("--prompt and --prompt-ids: both give prompts; give one of them")
    try:
        return [[int(i) for i in text.replace(",", " ").split()] for text in config.prompt_ids]
    except ValueError:
        raise ConfigError(
            f"prompt_ids={' '.join(map(repr, config.prompt_ids))}: must be token ids, such as '5 17 200'"
        ) from None


def _print(tokens, prompts: Sequence[str]) -> None:
    """One prompt: as it comes. Several: each as soon as it is whole."""
    texts = list(prompts)
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for token in tokens:
            print(token.text, end="", flush=True)
        print(flush=True)
        return
    for token in tokens:
        texts[token.row] += token.text
        if token.end:
            print(f"--- {token.row + 1} of {len(prompts)}\n{texts[token.row]}", flush=True)


def report(generator) -> str:
    """Times of the last call, and what a device sent for its prompts."""
    timing = generator.timing
    lines = [
        f"time to first token {1e3 * timing.first_token:.0f} ms (after {timing.compiling:.1f} s of compiling); then "
        f"{timing.tokens_per_second:.1f} tokens/s, {timing.tokens} tokens of {timing.rows} row(s)"
    ]
    tables = [table for key, table in generator.programs.tables.items() if key[0] == "prefill"]
    if tables and generator.mesh.shape["tp"] > 1:
        sent, bf16 = tables[-1].total()
        lines.append(
            f"a device sends {sent / 1e6:.2f} MB of activations for the prompts, {bf16 / 1e6:.2f} MB in bf16: ratio "
            f"{bf16 / sent:.2f}{', with error feedback' if generator.programs.error_feedback else ''}"
        )
    return "\n".join(lines)
