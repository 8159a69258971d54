"""The program behind `python -m taco_jax.serve`: settings, start, the address on stdout when it is ready."""

from __future__ import annotations

import dataclasses
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from taco_jax.config import ConfigError, cli
from taco_jax.inference.flags import ModelFlags
from taco_jax.launch.distributed import leave

DESCRIPTION = """Serve a model over HTTP with OpenAI's API, with compressed tensor parallelism.

/v1/completions, /v1/chat/completions (where the model has a chat template), /v1/models, /health. Without --api-key or
--api-key-file whoever reaches the port may use it, so it listens on this machine only unless --host says otherwise."""

LONGEST = 4096
MOST_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class ServeConfig(ModelFlags):
    """Serve a model over HTTP with OpenAI's API."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all of the machine's, for anybody who reaches them."""
    port: int = 8000
    """Port to listen on; 0 takes one that is free, which is printed."""
    allowed_host: tuple[str, ...] = ()
    """Host names of requests, besides localhost and --host; * is any, the default where --host is open to others."""
    api_key: str | None = None
    """What requests must bring (Authorization: Bearer KEY). The list of processes shows it; --api-key-file does not."""
    api_key_file: str | None = None
    """A file with the key, in a line of its own."""
    control_tokens: bool = True
    """Raw prompts may name control tokens, such as <|im_end|>; else that is plain text, and their ids are refused."""
    name: str | None = None
    """What requests call the model; None: the last part of its path."""
    chains: int | None = None
    """Parts of a long prompt side by side in each layer: one sends while another computes; None: 2 on a slow link."""
    batch: int = 16
    """Requests that are decoded together, each a row of the batch."""
    queue: int = 64
    """Requests that may wait for a row; more get status 429."""
    max_length: int | None = None
    """Tokens of a prompt and its answer together; None: the model's longest sequence, 4096 at most."""
    min_bytes: int | None = None
    """Messages below this many bytes are exact; None: as tuned, and all of decode steps; set, batches alter answers."""


def main(args: Sequence[str]) -> int:
    if (times := sum(arg.split("=")[0].replace("_", "-") == "--allowed-host" for arg in args)) > 1:
        raise ConfigError(f"--allowed-host: given {times} times; give it once, with all names: --allowed-host a b")
    config = cli.parse_flags(ServeConfig(), args, prog="python -m taco_jax.serve", description=DESCRIPTION)
    _check(config)
    cli.select_devices(config.devices, in_order=config.in_order)
    try:
        from taco_jax.inference.serving import app, process, service
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("starlette", "uvicorn", "jinja2", "anyio"):
            raise
        raise ConfigError(f"serving needs the package {error.name}: pip install 'taco-jax[serve]'") from None
    key = _key(config)
    bound = process.bind(config.host, config.port)
    cli.devices(config.devices)
    served, engine = _start(config, service)
    url, own = process.address(bound), process.is_loopback(bound)
    if not own and key is None:
        cli.say(
            f"warning: {url} is open to whoever reaches it; there is no authentication (--api-key-file)", sys.stderr
        )
    engine.start()
    try:
        process.serve(
            app.make_app(served, hosts=_hosts(config, bound), key=key), served, bound,
            lambda: cli.say(f"serving {served.name} at {url}/v1"), config.batch + config.queue,
        )  # fmt: skip
    finally:
        engine.stop()
        served.chat.close()
    if served.encoding:  # a thread still tokenises what nobody waits for any more, and nothing can end it
        leave(0)
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
    for host in config.allowed_host:
        if not re.fullmatch(r"\*|[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", host) or re.fullmatch(r"[^:]+:\d+", host):
            raise ConfigError(
                f"allowed_host={host!r}: must be a name or an address without a port, such as example.com, or *"
            )


def _hosts(config: ServeConfig, bound: socket.socket) -> tuple[str, ...] | None:
    """Names that Host may have; None: any."""
    from taco_jax.inference.serving import gate, process

    if not config.allowed_host and not process.is_loopback(bound):
        return None
    return (*gate.LOOPBACK, config.host, bound.getsockname()[0], *config.allowed_host)


def _key(config: ServeConfig) -> str | None:
    """The API key of the settings. Never shown: not in errors either."""
    if config.api_key is not None and config.api_key_file is not None:
        raise ConfigError("api_key and api_key_file: both name a key; give one of them")
    key, where = config.api_key, "api_key"
    if config.api_key_file is not None:
        where = f"api_key_file={config.api_key_file!r}"
        try:
            key = Path(config.api_key_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError, RuntimeError) as error:  # the last of a home that nobody has
            raise ConfigError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if key is not None and (not key or not all("!" <= c <= "~" for c in key)):
        raise ConfigError(f"{where}: the key must be one word of visible ASCII characters, and not empty")
    return key


def _start(config: ServeConfig, service):
    """(service, engine) with the model loaded and all programs compiled."""
    import jax

    from taco_jax.inference.sampling import NOT_FINITE, why_not_finite
    from taco_jax.inference.serving.batch_programs import RowPrograms
    from taco_jax.inference.serving.engine import Engine
    from taco_jax.inference.text import missing_tokenizer

    say = lambda text: cli.say(text, sys.stderr)
    begin = time.perf_counter()
    generator = config.generator()
    if generator.checkpoint.tokenizer is None:
        raise ConfigError(missing_tokenizer(generator.checkpoint.path))
    longest = _longest(config.max_length, generator.config.max_length)
    codecs = f"; codecs: tp {generator.programs.codecs}" if config.tp > 1 else ""
    say(f"{config.model} loaded in {time.perf_counter() - begin:.1f} s{codecs}")
    params = generator.programs.params
    programs = RowPrograms(
        generator.config, generator.settings, generator.mesh, params, batch=config.batch, longest=longest
    )
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
    room = config.batch + config.queue
    served = service.Service(generator, engine, name, longest, room, control_tokens=config.control_tokens)
    if served.chat.why:
        say(f"no chats: {served.chat.why}")
    return served, engine


def _longest(asked: int | None, of_model: int) -> int:
    if asked is not None and asked > of_model:
        raise ConfigError(f"max_length={asked}: the model's longest sequence has {of_model}")
    return min(of_model, LONGEST) if asked is None else asked
