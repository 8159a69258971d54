"""A collective's call: its arguments checked, and what they leave open decided for each direction's message."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from taco_jax.codec import Codec, as_codec
from taco_jax.collectives import topology
from taco_jax.collectives.manual_region import AxisName, check_axis, check_region
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.vjp import probing
from taco_jax.compression import tuned
from taco_jax.compression.compression import EXACT, Compression, as_compression
from taco_jax.compression.site_scales import STATS_WIDTH, SiteScales

DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of a collective. local: ranks of a host where messages may go in levels, else 0."""

    axis: AxisName
    compression: Compression
    scales: SiteScales
    key: jax.Array | None
    local: int = 0

    def message(self, label: Label, shape: tuple[int, ...], nbytes: int, *, sums: bool = True) -> Message:
        """The message of an x of this shape in label's direction, with what is left to the tuned values decided for its
        size. sums: it is an all-reduce."""
        c, ranks = self.compression, lax.axis_size(self.axis)
        codec = c.codecs[DIRECTIONS.index(label.direction)].of(shape)
        least, chunks, exchange = c.min_bytes, c.chunks, c.exchange
        if least is None and not codec.exact:
            least = tuned.default_min_bytes(codec.name, ranks, link=c.link)
        if nbytes == 0 or (least is not None and nbytes < least):
            # Not a call of jax.lax here: the custom_vjp also names the output for remat and lists both directions.
            codec = as_codec("none")
        fastest = self._fastest(codec, ranks, nbytes) if sums else None
        if not codec.exact and (chunks is None or exchange == "auto"):
            measured = tuned.transport(codec.name, ranks, nbytes)
            chunks = (fastest or measured)[0] if chunks is None else chunks
            exchange = measured[1] if exchange == "auto" else exchange
        if self.local == 1 < ranks and c.between is not None and not codec.exact:
            codec = c.between
        algorithm, local, between = self._levels(codec, ranks, nbytes)
        algorithm, why = (algorithm, "") if fastest is None else fastest[1:]
        slot = self.scales.slot
        return Message(
            self.axis, c, codec, label, algorithm=algorithm, why=why, chunks=chunks or 1, exchange=exchange,
            local=local, between=between, with_stats=slot is not None and slot.shape[-1] == STATS_WIDTH,
        )  # fmt: skip

    def _fastest(self, codec: Codec, ranks: int, nbytes: int) -> tuple[int, str, str] | None:
        """(chunks, algorithm, why) of a sum on one host that leaves its algorithm open, None where nothing says."""
        if codec.exact or self.local != ranks or self.compression.algorithm not in ("auto", "hierarchical"):
            return None
        if (found := tuned.winner(codec.name, ranks, nbytes)) is None:
            return None
        at, chunks, algorithm = found
        return chunks, algorithm, f"the faster one at {at:,} bytes, as tuned for {ranks} ranks of this link"

    def _levels(self, codec: Codec, ranks: int, nbytes: int) -> tuple[str, int, Codec | None]:
        """(algorithm, ranks of a host or 0, codec between hosts) of one direction's message."""
        algorithm = self.compression.algorithm
        small = algorithm == "auto" and nbytes < tuned.hierarchical_min_bytes()
        if codec.exact or small or self.local in (0, 1, ranks):
            return "auto" if algorithm == "hierarchical" else algorithm, 0, None
        return "hierarchical", self.local, self.compression.between or codec


def check_call(entry, axis, compression, *, scales=None, key=None, groups=None, levels=True, partly=False) -> Call:
    """The call of `entry`. Raises ValueError or TypeError for what it refuses, naming key and value.

    levels: whether its messages can go in levels, inside hosts and between. partly: whether they can go in a region
      that is not manual over all mesh axes.
    """
    if groups is not None:
        raise ValueError(f"{entry}: axis_index_groups is not supported; use a mesh with one axis per group level")
    check_axis(axis, entry)
    try:
        compression = as_compression(compression) or EXACT
        key = _typed_key(key)
        _check_scales(scales)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{entry}: {error}") from None
    check_region(axis, entry, partly=partly)
    levels = levels and compression.algorithm in ("auto", "hierarchical")
    local = _local(entry, axis, compression.ranks_per_host) if levels else 0
    used = SiteScales() if scales is None or compression.is_exact else scales
    return Call(axis, compression, used, key, local)


def _local(entry: str, axis: AxisName, ranks_per_host: int | None) -> int:
    """Ranks of the axis on a host. Raises ValueError where hosts would not have equally many."""
    ranks = lax.axis_size(axis)
    if ranks_per_host is None:
        return topology.ranks_per_host_here(axis)
    if ranks % ranks_per_host:
        valid = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ValueError(
            f"{entry}: ranks_per_host={ranks_per_host}: must divide the {ranks} ranks of axis {axis!r}: {valid}"
        )
    return ranks_per_host


def _check_scales(scales) -> None:
    """Raises TypeError or ValueError for what is no SiteScales of arrays as they must be."""
    if scales is None:
        return
    if not isinstance(scales, SiteScales):
        raise TypeError(f"scales={scales!r}: must be taco_jax.SiteScales(exponents, slot), or None for no site scale")
    arrays = {"exponents": (np.int32, [(2,)]), "slot": (np.float32, [(2, 1), (2, STATS_WIDTH)])}
    for name, (dtype, shapes) in arrays.items():
        value = getattr(scales, name)
        if value is None:
            continue
        rule = "must be " + ", ".join(f"{np.dtype(dtype)}{list(shape)}" for shape in shapes) + " or None"
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"scales.{name}={value!r}: {rule}")
        probed = name == "slot" and probing() and value.ndim == 2
        if (value.shape not in shapes and not probed) or value.dtype != dtype:
            raise ValueError(f"scales.{name} is {value.dtype}{list(value.shape)}: {rule}")


def _typed_key(key):
    """A typed key of a jax.random.key or of a jax.random.PRNGKey's raw words; None stays None."""
    if key is None:
        return None
    if isinstance(key, jax.Array | np.ndarray) and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.eval_shape(jax.random.key, 0)).shape
        if key.dtype == np.uint32 and key.shape == words:
            return jax.random.wrap_key_data(jnp.asarray(key))
    elif isinstance(key, jax.Array) and key.shape == ():
        return key
    given = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
    raise TypeError(f"key={given}: must be one key, of jax.random.key(seed) or an element of jax.random.split's result")
