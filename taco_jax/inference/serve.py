"""The program behind `python -m taco_jax.serve`: settings, start, the address on stdout when it is ready."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from taco_jax import cli
from taco_jax.config import ConfigError
from taco_jax.inference.flags import ModelFlags

DESCRIPTION = """Serve a model over HTTP with OpenAI's API, with compressed tensor parallelism.

/v1/completions, /v1/chat/completions (where the model has a chat template), /v1/models, /health. No authentication:
whoever reaches the port may use it, so it listens on this machine only unless --host says otherwise."""

LONGEST = 4096
MOST_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class ServeConfig(ModelFlags):
    """Serve a model over HTTP with OpenAI's API."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all of the machine's, for anybody who reaches them."""
    port: int = 8000
    """Port to listen on; 0 takes one that is free, which is printed."""
    name: str | None = None
    """What requests call the model; None: the last part of its path."""
    batch: int = 16
    """Requests that are decoded together, each a row of the batch."""
    queue: int = 64
    """Requests that may wait for a row; more get status 429."""
    max_length: int | None = None
    """Tokens of a prompt and its answer together; None: the model's longest sequence, 4096 at most."""
    min_bytes: int | None = None
    """Messages below this many bytes are sent exactly; None: as tuned for the link, and all of decode steps. If set, an
    answer may depend a little on those that are decoded beside it."""


def main(args: Sequence[str]) -> int:
    config = cli.parse_flags(ServeConfig(), args, prog="python -m taco_jax.serve", description=DESCRIPTION)
    _check(config)
    cli.select_devices(config.devices)
    try:
        from taco_jax.inference.serving import app, process, service
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("starlette", "uvicorn", "jinja2", "anyio"):
            raise
        raise ConfigError(f"serving needs the package {error.name}: pip install 'taco-jax[serve]'") from None
    bound = process.bind(config.host, config.port)
    cli.devices(config.devices)
    served, engine = _start(config, service)
    url = process.address(bound)
    if not process.is_loopback(bound):
        print(f"warning: {url} is open to whoever reaches it; there is no authentication", file=sys.stderr, flush=True)
    engine.start()
    try:
        process.serve(
            app.make_app(served), served, bound, lambda: print(f"serving {served.name} at {url}/v1", flush=True)
        )
    finally:
        engine.stop()
    return 0


def _check(config: ServeConfig) -> None:
    if not config.model:
        raise ConfigError("--model: is needed, for example --model path/to/model")
    for key, least in (("batch", 1), ("queue", 0), ("max_length", 2), ("port", 0)):
        value = getattr(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key}={value}: must be at least {least}")
    if config.batch > MOST_ROWS:
        raise ConfigError(f"batch={config.batch}: must be at most {MOST_ROWS}")
    if config.port > 65535:
        raise ConfigError(f"port={config.port}: must be at most 65535; 0 takes one that is free")


def _start(config: ServeConfig, service):
    """(service, engine) with the model loaded and all programs compiled."""
    import jax

    from taco_jax.inference.sampling import NOT_FINITE, why_not_finite
    from taco_jax.inference.serving.engine import Engine
    from taco_jax.inference.serving.programs import RowPrograms
    from taco_jax.inference.text import missing_tokenizer

    say = lambda text: print(text, file=sys.stderr, flush=True)
    begin = time.perf_counter()
    generator = config.generator()
    if generator.checkpoint.tokenizer is None:
        raise ConfigError(missing_tokenizer(generator.checkpoint.path))
    longest = _longest(config.max_length, generator.config.max_length)
    say(f"{config.model} loaded in {time.perf_counter() - begin:.1f} s")
    params = generator.programs.params
    programs = RowPrograms(generator.config, generator.settings, generator.mesh, params, config.batch, longest)
    try:
        programs.compile()
        first = programs.first_token()
        engine = Engine(programs, config.queue)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"batch={config.batch}, max_length={longest}: the device's memory does not hold the model, a cache of "
            f"{programs.cache_bytes / 1e6:.1f} MB and what programs need; make them smaller, or tp larger"
        ) from None
    if first == NOT_FINITE:
        raise ConfigError(f"--model {config.model}: {why_not_finite(config.dtype)}")
    say(
        f"compiled in {programs.compile_seconds:.1f} s: {config.batch} rows of {longest} tokens, their cache "
        f"{programs.cache_bytes / 1e6:.1f} MB a device"
    )
    name = config.name or Path(config.model).resolve().name
    served = service.Service(generator, engine, name, longest, config.batch + config.queue)
    if served.chat.why:
        say(f"no chats: {served.chat.why}")
    return served, engine


def _longest(asked: int | None, of_model: int) -> int:
    if asked is not None and asked > of_model:
        raise ConfigError(f"max_length={asked}: the model's longest sequence has {of_model}")
    return min(of_model, LONGEST) if asked is None else asked
