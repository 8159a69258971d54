"""The measurement of one message, beside the exact collective: how much each codec would lose of its values.

Nothing is sent for it. Every device encodes and decodes its own values, x, and of an all-reduce the sum, y, which all
have. Errors of rounding are independent, so their powers add up. Relative to the power of the result, for P ranks:

    all-reduce, two hops      ((P - 1) mean|Q(x) - x|^2 + |Q(y) - y|^2) / |y|^2
    all-reduce of two ranks   2 mean|Q(x) - x|^2 / |y|^2      (one hop; the own term is quantised too)
    reduce-scatter            (P - 1) mean|Q(x) - x|^2 / |y|^2
    all-to-all                (P - 1) / P mean|Q(x) - x|^2 / |x|^2
    all-gather, permute       mean|Q(x) - x|^2 / |x|^2

Powers are those of a mean element, scaled by a power of two so that float32 holds them. Of an array of more than
`SAMPLE` elements as many are looked at, in segments that are spread evenly.

Dim letters: R rows, each a message of its own, N elements of a row, M blocks, B elements of a block.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.codec import Codec, as_codec
from taco_jax.dropin import host_calls
from taco_jax.dropin.hlo_module import Module
from taco_jax.dropin.mesh_axes import Place
from taco_jax.dropin.replacement import automatic, in_thread, local_operands, recorded

SAMPLE = 1 << 22
SEGMENT = 4096
SUMS = ("all_reduce", "reduce_scatter")
HEADER = 3  # words: what program, in two, and which of its sites
LARGEST_EXPONENT = 125


class Observed(NamedTuple):
    """A collective over `place` of operands of these local shapes, and the codecs that are tried on its values.

    result: of a sum, its local shape. dimension: that is scattered or exchanged.
    """

    operation: str
    place: Place
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...] | None
    dimension: int
    codecs: tuple[str, ...]

    @property
    def ranks(self) -> int:
        sizes = dict(zip(self.place.mesh.axis_names, self.place.mesh.devices.shape))
        return int(np.prod([sizes[axis] for axis in self.place.axes]))


class Sample(NamedTuple):
    """The words of one run of a collective on one device.

    noise: by codec, as a share of `signal` only once both are added up over devices. second, fourth: moments of x.
    """

    program: str
    site: int
    partition: int
    signal: float
    noise: np.ndarray
    second: float
    fourth: float


def read(words: np.ndarray) -> Sample:
    """The sample that `_words` has written as uint32."""
    (high, low, site, partition), numbers = words[: HEADER + 1].tolist(), words[HEADER + 1 :].view(np.float32)
    of_x, of_y, x_exponent, second, fourth, exponent, signal = numbers[:7].astype(np.float64)
    noise = numbers[7:].astype(np.float64).reshape(2, -1)
    with np.errstate(all="ignore"):  # what is not finite is told by who reads it
        x_unit, unit = 4.0**x_exponent, 4.0**exponent
        noise = of_x * x_unit * noise[0] + of_y * unit * noise[1]
        second, fourth = second * x_unit, fourth * x_unit * x_unit
    program = f"{high:08x}{low:08x}"
    return Sample(program, site, partition, signal=signal * unit, noise=noise, second=second, fourth=fourth)


def header(program: str, site: int) -> list[int]:
    """The words that `read` gives back as program and site. program: 16 hexadecimal digits."""
    return [int(program[:8], 16), int(program[8:], 16), site]


_known: dict[Observed, Module] = {}
_known_lock = threading.Lock()


def find(observed: Observed) -> Module:
    """The module that measures; its operands are the header, x's and, of a sum, y."""
    with _known_lock:
        if observed not in _known:
            _known[observed] = in_thread(lambda: _compile(observed))
        return _known[observed]


def _compile(observed: Observed) -> Module:
    mesh = automatic(observed.place.mesh)
    every = P(mesh.axis_names)

    def local(header, *arrays):
        partition = lax.axis_index(mesh.axis_names).astype(jnp.uint32)
        xs, y = (arrays[:-1], arrays[-1]) if observed.result is not None else (arrays, None)
        words = jnp.concatenate([header, partition[None], _words(observed, xs, y)])
        return host_calls.call(words)[None]

    arrays = [((HEADER,), "uint32"), *((shape, observed.dtype) for shape in observed.shapes)]
    if observed.result is not None:
        arrays.append((observed.result, observed.dtype))
    specs = (every,) * len(arrays)
    measure = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=every, check_vma=False)
    return recorded(lambda *args: measure(*args), local_operands(mesh, arrays), mesh)


def _words(observed: Observed, xs: Sequence[jax.Array], y: jax.Array | None) -> jax.Array:
    """The numbers of `Sample`, float32 as uint32."""
    ranks, codecs = observed.ranks, [as_codec(name) for name in observed.codecs]
    x_RN = _sampled(_rows(observed, xs))
    x_exponent, x_unit, second, fourth = _moments(x_RN)
    of_x, of_y, exponent, unit, signal = 1.0, 0.0, x_exponent, x_unit, second
    if y is not None:
        y_1N = _sampled(y.reshape(1, -1))
        exponent, unit, signal, _ = _moments(y_1N)
    match observed.operation:
        case "all_reduce" if ranks == 2:
            of_x = 2.0
        case "all_reduce":
            of_x, of_y = ranks - 1.0, 1.0
        case "reduce_scatter":
            of_x = ranks - 1.0
        case "all_to_all":
            of_x = (ranks - 1.0) / ranks
    if of_y:
        # Of one shape: one encoding of both.
        both, units = jnp.concatenate([x_RN, y_1N]), jnp.stack([x_unit, unit])
        noise_2C = jnp.stack([_noise(codec, both, units) for codec in codecs], axis=1)
    else:
        units = jnp.broadcast_to(x_unit, x_RN.shape[:1])
        noise_C = jnp.stack([_noise(codec, x_RN, units).mean() for codec in codecs])
        noise_2C = jnp.stack([noise_C, jnp.zeros_like(noise_C)])
    numbers = jnp.stack([jnp.float32(n) for n in (of_x, of_y, x_exponent, second, fourth, exponent, signal)])
    return lax.bitcast_convert_type(jnp.concatenate([numbers, noise_2C.reshape(-1)]), jnp.uint32)


def _rows(observed: Observed, xs: Sequence[jax.Array]) -> jax.Array:
    """A device's values as the messages in which they would go, [R, N]."""
    (x, *others), ranks = xs, observed.ranks
    if others:
        return jnp.stack(xs).reshape(len(xs), -1)
    if observed.operation in ("reduce_scatter", "all_to_all"):
        return jnp.moveaxis(x, observed.dimension, 0).reshape(ranks, -1)
    return x.reshape(1, -1)


def _sampled(x_RN: jax.Array) -> jax.Array:
    """Segments of every row, evenly spread, of at most about `SAMPLE` elements in all."""
    rows, n = x_RN.shape
    apart = x_RN.size // SAMPLE
    segments = n // (SEGMENT * apart) if apart > 1 else 0
    if not segments:
        return x_RN
    cut = x_RN[:, : segments * apart * SEGMENT].reshape(rows, segments, apart, SEGMENT)
    return cut[:, :, 0].reshape(rows, -1)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(exponent k, 2^-k, mean of (x 2^-k)^2, of (x 2^-k)^4): the largest of x 2^-k is from 0.5 to 1."""
    x = x.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x)))
    exponent = jnp.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT)
    unit = jnp.ldexp(jnp.float32(1), -exponent)
    square = (x * unit) ** 2
    return exponent, unit, square.mean(), (square * square).mean()


def _noise(codec: Codec, x_RN: jax.Array, unit_R: jax.Array) -> jax.Array:
    """The mean power of what a codec loses of each row, in units of that row, [R]."""
    z_RMB = codec.to_blocks(x_RN)
    lost_RMB = (codec.rounded_blocks(z_RMB) - z_RMB) * unit_R[:, None, None]
    return (lost_RMB**2).sum((-2, -1)) / x_RN.shape[1]
