"""Digests of arrays that are the same however an array is spread over devices, for checkpoints.

    digest(x) = sum over all positions p of bits(x[p]) * row(p[:-1]) * column(p[-1])   modulo 2^32

`row` and `column` are odd numbers that a hash draws from coordinates alone, so every device adds up what it has, and
an array that is cut elsewhere, or padded with what does not count, has the same digest. A change of one element always
shows: it is less than 2^32 and not 0, and odd factors keep it so. Any other goes unseen once in 2^32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# A factor for each dim, the last one's first: any odd numbers without a pattern.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0x7FEB352D, 0x846CA68B, 0xB5297A4D)
# What a checkpoint's record has: {name: digest} of every array as it is stored, and {name: {dim: [size, digest]}}
# without what a dim has beyond `size`.
DIGESTS, UNPADDED = "digests", "unpadded_digests"
# In records of earlier versions: the padding that all digests leave out, of every dim that has its length.
VOCABULARY = "vocabulary"
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32"}


def record_of(arrays: dict[str, jax.Array], size: int, padded: int) -> dict[str, Any]:
    """Returns what a checkpoint's record says of its arrays, on every process.

    Args:
      size, padded: the vocabulary's, and that to which the mesh pads it. A dim of length `padded` has a digest without
        its padding too: its length alone does not tell that it is one of tokens.
    """
    found = {DIGESTS: digests(arrays, {name: leaf.shape for name, leaf in arrays.items()}), UNPADDED: {}}
    for dim in range(max((leaf.ndim for leaf in arrays.values()), default=0)) if size < padded else ():
        long = {name: leaf for name, leaf in arrays.items() if leaf.ndim > dim and leaf.shape[dim] == padded}
        limits = {name: (*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]) for name, leaf in long.items()}
        for name, digest in digests(long, limits).items():
            found[UNPADDED].setdefault(name, {})[str(dim)] = [size, digest]
    return found


def take_damaged(record: dict[str, Any], found: dict[str, jax.Array], stored: dict[str, tuple[int, ...]]) -> list[str]:
    """Takes what `record_of` made out of a record; returns the names of arrays that are not those of which it was made.

    Args:
      found, stored: the arrays on this mesh, and their shapes in the checkpoint. Padding was cut off or added where
        these differ: what is beyond the stored shape does not count, and an array that has become shorter is compared
        without padding. Records of earlier versions may have no digests.
    """
    saved, unpadded = record.pop(DIGESTS, None), record.pop(UNPADDED, {})
    size, padded = record.pop(VOCABULARY, (0, 0))
    if saved is None:
        return []
    arrays = {name: leaf for name, leaf in found.items() if name in saved}
    limits = {name: tuple(size if n == padded else n for n in stored[name]) for name in arrays}
    for name, leaf in arrays.items():
        for dim in (str(d) for d, (now, then) in enumerate(zip(leaf.shape, stored[name])) if now < then):
            if dim in unpadded.get(name, {}):
                least, saved[name] = unpadded[name][dim]
                limits[name] = tuple(least if str(d) == dim else n for d, n in enumerate(limits[name]))
    return [name for name, digest in digests(arrays, limits).items() if digest != saved[name]]


def of_params(params: Any, vocab_size: int) -> dict[str, int]:
    """{name of a parameter: digest} without the vocabulary's padding: the same on every mesh."""
    from taco_jax.models.huggingface import VOCAB_DIM

    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    real = lambda name, shape: tuple(vocab_size if VOCAB_DIM.get(name) == dim else n for dim, n in enumerate(shape))
    return digests(named, {name: real(name, leaf.shape) for name, leaf in named.items()})


def digests(arrays: dict[str, jax.Array], limits: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """{name: digest}, the same on every process; all of them call it with the same names.

    limits: of every name and dim, from which coordinate on elements do not count.
    """
    parts = [_of_shards(array, limits[name]) for name, array in arrays.items()]
    sums = np.array([sum(map(int, part)) % (1 << 32) for part in parts], np.uint32)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        sums = np.asarray(multihost_utils.process_allgather(sums)).sum(0, dtype=np.uint32)
    return dict(zip(arrays, map(int, sums)))


def _of_shards(array: jax.Array, limits: tuple[int, ...]) -> list[Any]:
    """The digests of this process' parts of an array, each part once."""
    found = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.data.size:
            starts = np.array([cut.start or 0 for cut in shard.index], np.uint32)
            if shard.device.platform == "cpu":
                found.append(_part(np, np.asarray(shard.data), starts, limits))
            else:
                found.append(_on_device(shard.data, starts, limits))  # not waited for before all are under way
    return found


@functools.partial(jax.jit, static_argnames="limits")
def _on_device(x: jax.Array, starts: jax.Array, limits: tuple[int, ...]) -> jax.Array:
    return _part(jnp, x, starts, limits)


def _part(xp: Any, x: Any, starts: Any, limits: tuple[int, ...]) -> Any:
    """The digest of a part of an array that begins at `starts`, by numpy or jax.numpy."""
    rows, columns = xp.zeros(1, "uint32"), xp.zeros(1, "uint32")
    row_counts = column_counts = xp.ones(1, "uint32")
    for dim in range(x.ndim):
        place = xp.arange(x.shape[dim], dtype="uint32") + starts[dim]
        counts = (place < limits[dim]).astype("uint32")
        place = place * np.uint32(_FACTORS[x.ndim - 1 - dim])
        if dim == x.ndim - 1:
            columns, column_counts = place, counts
        else:
            rows = (rows[:, None] + place).reshape(-1)
            row_counts = (row_counts[:, None] * counts).reshape(-1)
    rows, columns = _odd(rows) * row_counts, _odd(columns) * column_counts
    name = _UNSIGNED[x.dtype.itemsize]
    if xp is np:
        bits = np.ascontiguousarray(x).view(name).astype("uint32", copy=False).reshape(len(rows), len(columns))
        return (np.einsum("rc,c->r", bits, columns) * rows).sum(dtype="uint32")
    bits = lax.bitcast_convert_type(x.astype("uint8") if x.dtype == bool else x, jnp.dtype(name)).astype("uint32")
    return ((bits.reshape(len(rows), len(columns)) * columns).sum(1, dtype="uint32") * rows).sum(dtype="uint32")


def _odd(x: Any) -> Any:
    """A hash of uint32 to odd uint32."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    return (x ^ (x >> 15)) | np.uint32(1)
