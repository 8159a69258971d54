"""Flags of `python -m taco_jax.tune`, and their rules."""

from __future__ import annotations

import dataclasses

from taco_jax.codec import CODECS, FLOAT_DTYPES
from taco_jax.compression import timings
from taco_jax.compression.compression import BACKENDS, EXCHANGES, MAX_CHUNKS, SHOTS
from taco_jax.config import ConfigError
from taco_jax.errors import did_you_mean


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """The measurement, and where its result goes."""

    codecs: tuple[str, ...] = ("int8h", "taco", "int6h", "int4h")
    """Codecs to measure."""
    smallest: int = 1 << 16
    """Smallest message, in bytes of the tensor that is summed, scattered, sent, or gathered."""
    largest: int = 1 << 28
    """No message is larger than this many bytes."""
    factor: int = 4
    """From one message size to the next."""
    operations: tuple[str, ...] = timings.OPERATIONS
    """Collectives to measure: psum, psum_scatter, all_gather, ppermute. The others join a file that has psum."""
    algorithms: tuple[str, ...] = SHOTS
    """Algorithms of a sum to try: one_shot, two_shot."""
    chunks: tuple[int, ...] = (1, 2, 4)
    """Numbers of chunks to try."""
    smallest_chunk: int = 1 << 20
    """Chunks of fewer bytes of the tensor are not tried."""
    exchanges: tuple[str, ...] = ("all_to_all", "ring")
    """Ways of the first hop to try: all_to_all, ring."""
    ranks: int | None = None
    """Devices that take part; None takes all."""
    dtype: str = "bfloat16"
    """Type of the tensor: bfloat16, float16 or float32."""
    backend: str = "auto"
    """What encodes and decodes: mosaic or triton (GPU kernels), jnp, or auto, a kernel where the device has one."""
    repeats: int = 7
    """Timed calls of each program; their median counts."""
    output: str | None = None
    """File of the result; None takes the one that layers read."""
    devices: str | None = None
    """'cpu:8' emulates eight devices on the CPU; 'cpu', 'gpu' or None take what JAX finds."""

    @property
    def sizes(self) -> list[int]:
        sizes = [self.smallest]
        while sizes[-1] * self.factor <= self.largest:
            sizes.append(sizes[-1] * self.factor)
        return sizes


def check(config: TuneConfig) -> TuneConfig:
    """Returns `config`, or raises ConfigError with one line."""

    def require(holds, key, value, rule):
        if not holds:
            raise ConfigError(f"{key}={value!r}: {rule}")

    # Its messages are flat, and have no tokens.
    compressed = [name for name, codec in CODECS.items() if not (codec.exact or codec.per_token)]
    require(config.codecs, "codecs", (), "name at least one")
    for name in config.codecs:
        require(name in compressed, "codecs", name, f"no such codec preset; {did_you_mean(name, compressed)}")
    for exchange in config.exchanges:
        require(exchange in EXCHANGES[1:], "exchanges", exchange, did_you_mean(exchange, EXCHANGES[1:]))
    require(config.exchanges, "exchanges", (), "name at least one")
    for key, valid in (("operations", timings.OPERATIONS), ("algorithms", SHOTS)):
        require(getattr(config, key), key, (), "name at least one")
        for value in getattr(config, key):
            require(value in valid, key, value, did_you_mean(value, valid))
    fits = config.chunks and min(config.chunks) >= 1 and max(config.chunks) <= MAX_CHUNKS
    require(fits, "chunks", config.chunks, f"must be numbers from 1 to {MAX_CHUNKS}")
    require(config.backend in BACKENDS, "backend", config.backend, did_you_mean(config.backend, BACKENDS))
    require(config.dtype in FLOAT_DTYPES, "dtype", config.dtype, did_you_mean(config.dtype, FLOAT_DTYPES))
    require(config.smallest >= 4, "smallest", config.smallest, "must be at least 4 bytes")
    require(config.largest >= config.smallest, "largest", config.largest, f"must be at least {config.smallest}")
    for key, least in (("repeats", 1), ("smallest_chunk", 1), ("ranks", 2), ("factor", 2)):
        value = getattr(config, key)
        require(value is None or value >= least, key, value, f"must be at least {least}")
    return config
