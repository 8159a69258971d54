"""Which implementation runs a codec operation, and the jnp one.

The operations are what a fused kernel does in one pass over memory:

* encode: x -> P wires (rotate, scale, cast, pack); encode_with_residual: also what the wires lost
* reduce_encode, reduce_decode: P wires and the owner's own values -> their sum in f32, in rank order, own term
  unquantised (decode, rotate own, add), and encoded again, or rotated back
* sum_decode: P wires -> the sum of what they say
* decode: P wires -> x

x is flat; a `Geometry` says which of its elements each message holds, so callers neither pad x nor cut their own chunk
out of it: a kernel reads its part where it lies. `backend` is "auto" (a kernel where there is one for the device, codec
and dtype), or the name of one; forced where it cannot run it raises KernelUnavailableError. With statistics
(`with_stats`) the jnp implementation always runs: no kernel counts them.

Dim letters: P messages (ranks), S elements of x, N elements of a message, M blocks, B block.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import OPERATIONS, Format, Geometry, KernelSpec, KernelUnavailableError
from pallas_kernels import choose as choose_kernel
from pallas_kernels import load as load_kernels
from pallas_kernels.dispatch import TOKEN, describe, missing_package, only_in_jnp, region_device
from taco_jax.codec import UNCALIBRATED, Codec, as_codec, check_choice
from taco_jax.compat import as_varying, varying_axes
from taco_jax.compression.compression import BACKENDS

# Which implementation

Choices = dict[tuple[str, str], list[tuple[str, str]]]  # (codec, operation) -> (implementation, reason), each once
_choices: contextvars.ContextVar[Choices | None] = contextvars.ContextVar("taco_jax_choices", default=None)


@contextlib.contextmanager
def record() -> Iterator[Choices]:
    """Collects what is chosen for the messages that are traced inside the block: what runs, not what might."""
    token = _choices.set({})
    try:
        yield _choices.get()
    finally:
        _choices.reset(token)


def to_format(codec: Codec, *, encodes: bool = True) -> Format:
    """The codec as kernels take it. What only decodes does not round to codes, and takes no seed for it."""
    rounding = codec.rounding if encodes else "nearest"
    return Format(codec.element, codec.block, codec.rotation, codec.scale, rounding)


def without_format(codec: Codec) -> str | None:
    """Why only the jnp reference has this codec, on every device; None if it has a `Format`."""
    return only_in_jnp(codec.name, codec.element, _block(codec), codec.scale)


def _block(codec: Codec) -> int | str:
    """Returns the block as the choice of a kernel takes it."""
    return TOKEN if codec.per_token else codec.block


def choose(
    codec: str | Codec,
    device,
    dtype: str,
    elements: int = 1 << 26,
    *,
    operation="encode",
    backend="auto",
    geometry=None,
) -> tuple[str, str]:
    """(implementation, reason) of an operation ("encode", "reduce", "decode") for messages of `codec` on `device`.

    The implementation is "mosaic", "triton" or "jnp", or "jax.lax" for codec `none`. Raises KernelUnavailableError
    where `backend` is forced and cannot run it.
    """
    check_choice("backend", backend, BACKENDS)
    codec = as_codec(codec)
    if codec.exact:
        return "jax.lax", "codec none sends values as they are"
    spec = KernelSpec(
        operation, codec.name, codec.element, _block(codec), rotation=codec.rotation, scale=codec.scale,
        dtype=str(jnp.dtype(dtype)), elements=elements, rounding=codec.rounding, geometry=geometry,
    )  # fmt: skip
    return choose_kernel(spec, device, force=None if backend == "auto" else backend)


def implementation(codec: Codec, operation: str, dtype, elements: int, backend="auto", geometry=None) -> str:
    """Returns what runs an operation in the region that is being traced.

    Warns, once a process, where a package is missing that would bring kernels for the device.
    """
    device = region_device()
    choice = choose(codec, device, dtype, elements, operation=operation, backend=backend, geometry=geometry)
    note(codec, operation, choice)
    if choice[0] == "jnp" and backend == "auto" and choice[1] == missing_package(device):
        _warn_once(f"{describe(device)}: {choice[1]}; without them codecs run in plain XLA")
    return choice[0]


@functools.cache
def _warn_once(line: str) -> None:
    warnings.warn(line, stacklevel=4)


def note(codec: Codec, operation: str, choice: tuple[str, str]) -> None:
    """Adds (name, reason) of what runs an operation to what `record` collects."""
    recorded = _choices.get()
    if recorded is not None and choice not in recorded.setdefault((codec.name, operation), []):
        recorded[codec.name, operation].append(choice)


def check_backend(codec: str | Codec, device, dtype: str, backend: str) -> None:
    """Raises KernelUnavailableError where a forced backend cannot run the codec on the device at all.

    Whether it can also run the messages that there are (their size, the number of ranks) is known when they are traced.
    """
    for operation in OPERATIONS if backend != "auto" else ():
        choose(codec, device, dtype, operation=operation, backend=backend)


def _kernels(codec, operation, dtype, elements, backend, geometry=None, with_stats=False):
    """The kernel package that runs an operation here, None for jnp."""
    if with_stats:
        return None
    name = implementation(codec, operation, dtype, elements, backend=backend, geometry=geometry)
    return None if name == "jnp" else load_kernels(name)


# The operations


def encode(
    codec: Codec, geometry: Geometry, x_S: jax.Array, exponent=None, key=None, *, with_stats=False, backend="auto"
) -> tuple[jax.Array, jax.Array]:
    """dtype[S] -> (wires uint8[P, wire_bytes(N)], measure float32[1 or 6]: largest scale, then `Codec.measure`)."""

    def reference():
        return _encode_blocks(codec, codec.to_blocks(_messages(x_S, geometry)), exponent, key, with_stats)

    def kernel():
        wires, largest = kernels.encode(to_format(codec), geometry, x_S, _scalar(exponent), codec.seed(key))
        return _typed(wires, *inputs), _typed(largest[None], *inputs)

    inputs = x_S, exponent, key
    kernels = _kernels(codec, "encode", x_S.dtype, x_S.size, backend=backend, geometry=geometry, with_stats=with_stats)
    return _where_it_can(codec, exponent, kernels, kernel, reference=reference, inputs=inputs)


def encode_with_residual(
    codec: Codec, geometry: Geometry, x_S: jax.Array, exponent=None, key=None, *, with_stats=False, backend="auto"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`encode`, and x - decode(wires) as x's dtype[S]; of a geometry that is a chunk dtype[P * N], its messages side by
    side, where what lies beyond x has no meaning.

    One pass where a kernel package has `encode_with_residual` for the format, else a decoding and a difference.
    """
    options = {"with_stats": with_stats, "backend": backend}

    def separate():
        wires, measure = encode(codec, geometry, x_S, exponent, key, **options)
        p, n = geometry.messages, geometry.per_message
        alone = geometry if geometry.is_whole else Geometry(p * n, p, n)
        pieces = x_S if geometry.is_whole else _messages(x_S, geometry).reshape(-1)
        decoded = decode(codec, alone, wires, x_S.dtype, exponent, backend=backend)
        return wires, measure, (pieces.astype(jnp.float32) - decoded).astype(x_S.dtype)

    def kernel():
        given = geometry, x_S, _scalar(exponent), codec.seed(key)
        wires, largest, error = kernels.encode_with_residual(to_format(codec), *given)
        return tuple(_typed(y, *inputs) for y in (wires, largest[None], error))

    inputs = x_S, exponent, key
    kernels = _kernels(codec, "encode", x_S.dtype, x_S.size, backend=backend, geometry=geometry, with_stats=with_stats)
    if kernels is not None and not _leaves_residual(kernels, "RESIDUAL", codec, x_S.dtype, geometry):
        kernels = None
    if kernels is not None:
        # What reads wires is said too, as where it runs by itself.
        implementation(codec, "decode", x_S.dtype, geometry.elements, backend=backend, geometry=geometry)
    return _where_it_can(codec, exponent, kernels, kernel, reference=separate, inputs=inputs)


def _leaves_residual(kernels, operation: str, codec: Codec, dtype, geometry: Geometry) -> bool:
    """Returns whether a kernel package has an operation (the name of its name) that leaves the residual behind."""
    operation = getattr(kernels, operation, None)
    if operation is None:
        return False
    return kernels.why_unsupported(to_format(codec), operation, str(jnp.dtype(dtype)), geometry) is None


def reduce_encode(
    codec: Codec, geometry: Geometry, wires, x_S, rank, exponent=None, key=None, *, with_stats=False, backend="auto"
) -> tuple[jax.Array, jax.Array]:
    """Wires of P ranks and rank `rank`'s own x -> (the sum's wire uint8[wire_bytes(N)], measure)."""

    def reference():
        z_MB = _sum_blocks(codec, wires, _own(x_S, geometry, rank), rank, exponent)
        return _encode_blocks(codec, z_MB, exponent, key, with_stats)

    def kernel():
        seed = codec.seed(key)
        own = {"rank": rank, "exponent": _scalar(exponent), "seed": seed}
        wire, largest = kernels.reduce_encode(to_format(codec), geometry, wires, x_S, **own)
        return _typed(wire, *inputs), _typed(largest[None], *inputs)

    inputs = wires, x_S, rank, exponent, key
    kernels = _kernels(
        codec, "reduce", x_S.dtype, geometry.per_message, backend=backend, geometry=geometry, with_stats=with_stats
    )
    return _where_it_can(codec, exponent, kernels, kernel, reference=reference, inputs=inputs)


def reduce_encode_with_residual(
    codec: Codec, geometry: Geometry, wires, x_S, rank, exponent=None, key=None, *, with_stats=False, backend="auto"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`reduce_encode`, and the sum less what its wire says, both rounded to x's dtype[N].

    One pass where a kernel package has `reduce_encode_with_residual` for the format, else two more kernels.
    """

    def separate():
        given = {"rank": rank, "exponent": exponent, "key": key, "with_stats": with_stats, "backend": backend}
        sent = reduce_encode(codec, geometry, wires, x_S, **given)
        sum_N = reduce_decode(codec, geometry, wires, x_S, rank=rank, exponent=exponent, backend=backend)
        said_N = sum_decode(codec, sent[0][None], geometry.per_message, x_S.dtype, exponent, backend=backend)
        return *sent, (sum_N.astype(jnp.float32) - said_N).astype(x_S.dtype)

    def kernel():
        own = {"rank": rank, "exponent": _scalar(exponent), "seed": codec.seed(key)}
        found = kernels.reduce_encode_with_residual(to_format(codec), geometry, wires, x_S, **own)
        wire, largest, error = (_typed(y, *inputs) for y in found)
        return wire, largest[None], error

    inputs = wires, x_S, rank, exponent, key
    kernels = _kernels(
        codec, "reduce", x_S.dtype, geometry.per_message, backend=backend, geometry=geometry, with_stats=with_stats
    )
    if kernels is not None and not _leaves_residual(kernels, "RESIDUAL_OF_SUM", codec, x_S.dtype, geometry):
        kernels = None
    return _where_it_can(codec, exponent, kernels, kernel, reference=separate, inputs=inputs)


def reduce_decode(
    codec: Codec, geometry: Geometry, wires, x_S, rank, exponent=None, *, dtype=None, backend="auto"
) -> jax.Array:
    """Wires of P ranks and the own x -> the sum dtype[N]; dtype: x's by default, or float32."""
    dtype = jnp.dtype(x_S.dtype if dtype is None else dtype)
    # What fits with x as wide as the sum fits with a narrower one.
    kernels = _kernels(codec, "reduce", dtype, geometry.per_message, backend=backend, geometry=geometry)
    if kernels is None:
        z_MB = _sum_blocks(codec, wires, _own(x_S, geometry, rank), rank, exponent)
        return codec.from_blocks(z_MB, geometry.per_message, dtype)
    own = {"rank": rank, "exponent": _scalar(exponent)} | ({} if dtype == x_S.dtype else {"dtype": dtype})
    y_N = kernels.reduce_decode(to_format(codec, encodes=False), geometry, wires, x_S, **own)
    return _typed(y_N, wires, x_S, rank, own["exponent"])


def sum_decode(codec: Codec, wires: jax.Array, n: int, dtype, exponent=None, *, backend="auto") -> jax.Array:
    """Wires of P ranks -> the sum of what they say, dtype[N], in f32 and rank order (one-shot: own wire too)."""
    # A sum of P wires, to what may become of it: what hinders a reduction hinders it.
    p = wires.shape[0]
    kernels = _kernels(codec, "reduce", dtype, n, backend=backend, geometry=Geometry(p * n, p, n))
    if kernels is None:
        z_PMB = codec.decode_blocks(wires, codec.n_blocks(n), exponent=exponent)
        return codec.from_blocks(_in_rank_order(list(z_PMB)), n, dtype)
    exponent = _scalar(exponent)
    return _typed(kernels.sum_decode(to_format(codec, encodes=False), wires, n, dtype, exponent), wires, exponent)


def sum_decode_apart(
    codec: Codec, own: jax.Array, received: jax.Array, rank, n: int, *, dtype, exponent=None, backend="auto"
) -> jax.Array:
    """`sum_decode` of two ranks' wires uint8[wire_bytes(N)] that lie apart, this rank's and the other one's.

    A kernel package that has `sum_decode_apart` reads each where it lies; for others the two are put together first.
    """
    kernels = _kernels(codec, "reduce", dtype, n, backend=backend, geometry=Geometry(2 * n, 2, n))
    if not hasattr(kernels, "sum_decode_apart"):
        wires = jnp.where(rank == 0, jnp.stack([own, received]), jnp.stack([received, own]))
        return sum_decode(codec, wires, n, dtype, exponent, backend=backend)
    fmt, exponent = to_format(codec, encodes=False), _scalar(exponent)
    y_N = kernels.sum_decode_apart(fmt, own, received, rank, n, dtype=dtype, exponent=exponent)
    return _typed(y_N, own, received, rank, exponent)


def decode(codec: Codec, geometry: Geometry, wires: jax.Array, dtype, exponent=None, *, backend="auto") -> jax.Array:
    """Wires uint8[P, wire_bytes(N)] of messages that lie side by side -> dtype[S]."""
    kernels = _kernels(codec, "decode", dtype, geometry.elements, backend=backend, geometry=geometry)
    if kernels is None:
        n = geometry.per_message
        y_S = codec.from_blocks(codec.decode_blocks(wires, codec.n_blocks(n), exponent=exponent), n, dtype).reshape(-1)
        return y_S if y_S.size == geometry.elements else y_S[: geometry.elements]
    exponent = _scalar(exponent)
    return _typed(kernels.decode(to_format(codec, encodes=False), geometry, wires, dtype, exponent), wires, exponent)


def decode_chunks(
    codec: Codec, geometries: Sequence[Geometry], wires: Sequence[jax.Array], dtype, exponent=None, *, backend="auto"
) -> jax.Array:
    """Wires of the chunks of P messages -> dtype[S]; each chunk is decoded by itself, as soon as it is there.

    A kernel package that has `decode_into(fmt, geometry, wires, into dtype[S], exponent) -> dtype[S]` writes every
    chunk where it belongs; the others' chunks are joined by one more pass.
    """
    if len(geometries) == 1:
        return decode(codec, geometries[0], wires[0], dtype, exponent, backend=backend)
    first = geometries[0]
    kernels = _kernels(codec, "decode", dtype, first.elements, backend=backend, geometry=first)
    if hasattr(kernels, "decode_into"):
        exponent = _scalar(exponent)
        y_S = lax.empty((first.elements,), dtype)
        for geometry, chunk in zip(geometries, wires):
            y_S = kernels.decode_into(to_format(codec, encodes=False), geometry, chunk, y_S, exponent)
        return _typed(y_S, *wires, exponent)
    rows = []
    for geometry, chunk in zip(geometries, wires):
        p, n = geometry.messages, geometry.per_message
        rows.append(decode(codec, Geometry(p * n, p, n), chunk, dtype, exponent, backend=backend).reshape(p, n))
    return jnp.concatenate(rows, axis=1).reshape(-1)[: first.elements]


def _where_it_can(codec: Codec, exponent, kernels, kernel, reference, inputs):
    """kernel() where there is one. With one scale for a whole message a kernel needs that scale before it starts."""
    if kernels is None or (codec.scale == "site" and exponent is None):
        return reference()
    if codec.scale != "site":
        return kernel()
    typed = lambda results: tuple(_typed(r, *inputs) for r in results)  # branches must vary over the same axes
    return lax.cond(exponent != UNCALIBRATED, lambda: typed(kernel()), lambda: typed(reference()))


# The jnp implementation


def _messages(x_S: jax.Array, geometry: Geometry) -> jax.Array:
    """dtype[S] -> dtype[P, N], with zeros beyond x."""
    whole = geometry.messages * geometry.distance
    if x_S.size < whole:
        x_S = jnp.concatenate([x_S, jnp.zeros_like(x_S, shape=(whole - x_S.size,))])
    rows = x_S.reshape(geometry.messages, geometry.distance)
    return rows if geometry.is_whole else rows[:, geometry.offset : geometry.offset + geometry.per_message]


def _own(x_S: jax.Array, geometry: Geometry, rank) -> jax.Array:
    return lax.dynamic_index_in_dim(_messages(x_S, geometry), rank, keepdims=False)


def _encode_blocks(codec, z, exponent, key, with_stats):
    wires, largest = codec.encode_blocks(z, exponent=exponent, key=key)
    measure = largest[None]
    if with_stats:
        measure = jnp.concatenate([measure, codec.measure(z, wires, exponent=exponent)])
    return wires, measure


def _sum_blocks(codec, wires, own_N, rank, exponent):
    own_MB = codec.to_blocks(own_N)
    z_PMB = codec.decode_blocks(wires, own_MB.shape[0], exponent=exponent)
    return _in_rank_order([lax.select(rank == p, own_MB, z_MB) for p, z_MB in enumerate(z_PMB)])


def _in_rank_order(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _scalar(exponent):
    return None if exponent is None else jnp.asarray(exponent, jnp.int32)


def _typed(y: jax.Array, *inputs) -> jax.Array:
    """A kernel's result, varying like its inputs: it comes back typed as if it were the same on every device."""
    return as_varying(y, sorted({axis for i in inputs if i is not None for axis in varying_axes(i)}))


__all__ = [
    "BACKENDS", "Geometry", "KernelUnavailableError", "check_backend", "choose", "decode", "decode_chunks",
    "encode", "encode_with_residual", "implementation", "note", "record", "reduce_decode", "reduce_encode",
    "reduce_encode_with_residual", "sum_decode", "sum_decode_apart", "to_format", "without_format",
]  # fmt: skip
