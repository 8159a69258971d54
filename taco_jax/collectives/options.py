"""The arguments that all collectives share: checked, and what they leave open decided for each direction's message."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from taco_jax import tuned
from taco_jax.codec import Codec, as_codec
from taco_jax.collectives import hosts
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.region import AxisName, check_axis, check_region
from taco_jax.plan import check_levels, check_transport
from taco_jax.scales import STATS_WIDTH, SiteScales


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments that all collectives share; `codecs` are those of both directions."""

    axis: AxisName
    codecs: tuple[Codec, Codec]
    scales: SiteScales
    algorithm: str
    min_bytes: int | None
    backend: str
    chunks: int | None
    exchange: str
    link: str
    key: jax.Array | None
    # Ranks of a host where messages may go in levels, else 0; the codec between hosts.
    local: int = 0
    between: Codec | None = None

    def message(self, codec: Codec, shape: tuple[int, ...], nbytes: int, label: Label, *, sums: bool = True) -> Message:
        """The message of one direction of an x of this shape, with what is left to the tuned values decided for its
        size. sums: it is an all-reduce."""
        ranks, codec = lax.axis_size(self.axis), codec.of(shape)
        least, chunks, exchange = self.min_bytes, self.chunks, self.exchange
        if least is None and not codec.exact:
            least = tuned.default_min_bytes(codec.name, ranks, link=self.link)
        if nbytes == 0 or (least is not None and nbytes < least):
            # Not a call of jax.lax here: the custom_vjp also names the output for remat and lists both directions.
            codec = as_codec("none")
        fastest = self._fastest(codec, ranks, nbytes) if sums else None
        if not codec.exact and (chunks is None or exchange == "auto"):
            measured = tuned.transport(codec.name, ranks, nbytes)
            chunks = (fastest or measured)[0] if chunks is None else chunks
            exchange = measured[1] if exchange == "auto" else exchange
        slot = self.scales.slot
        with_stats = slot is not None and slot.shape[-1] == STATS_WIDTH
        if self.local == 1 < ranks and self.between is not None and not codec.exact:
            codec = self.between
        algorithm, local, between = self._levels(codec, ranks, nbytes)
        algorithm, why = (algorithm, "") if fastest is None else fastest[1:]
        return Message(self.axis, codec, algorithm, with_stats, label, self.backend, chunks or 1, exchange, self.link,
                       local, between, why=why)  # fmt: skip

    def _fastest(self, codec: Codec, ranks: int, nbytes: int) -> tuple[int, str, str] | None:
        """(chunks, algorithm, why) of a sum on one host that leaves its algorithm open, None where nothing says."""
        if codec.exact or self.local != ranks or self.algorithm not in ("auto", "hierarchical"):
            return None
        if (found := tuned.winner(codec.name, ranks, nbytes)) is None:
            return None
        at, chunks, algorithm = found
        return chunks, algorithm, f"the faster one at {at:,} bytes, as tuned for {ranks} ranks of this link"

    def _levels(self, codec: Codec, ranks: int, nbytes: int) -> tuple[str, int, Codec | None]:
        """(algorithm, ranks of a host or 0, codec between hosts) of one direction's message."""
        small = self.algorithm == "auto" and nbytes < tuned.hierarchical_min_bytes()
        if codec.exact or small or self.local in (0, 1, ranks):
            return "auto" if self.algorithm == "hierarchical" else self.algorithm, 0, None
        return "hierarchical", self.local, self.between or codec


def check_options(entry, axis, codec, backward_codec, scales, key, groups, link, min_bytes, backend, chunks, exchange,
                  algorithm=None, ranks_per_host=None, between_hosts=None) -> Options:  # fmt: skip
    """The options of a call of `entry`. Raises ValueError or TypeError for what it refuses, naming key and value.

    algorithm: None for an operation that knows only one.
    """
    if groups is not None:
        raise ValueError(f"{entry}: axis_index_groups is not supported; use a mesh with one axis per group level")
    check_axis(axis, entry)
    for name, c in (("codec", codec), ("backward_codec", backward_codec)):
        if not isinstance(c, Codec | str | None):
            raise TypeError(f"{entry}: {name}={c!r} must be a preset name or a Codec")
    try:
        codecs = as_codec(codec), as_codec(codec if backward_codec is None else backward_codec, "backward_codec")
        chunks, min_bytes = check_transport(algorithm or "auto", link, backend, exchange, chunks, min_bytes)
        local, between = check_levels(algorithm, ranks_per_host, between_hosts)
        key = _typed_key(key)
        _check_scales(scales)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{entry}: {error}") from None
    check_region(axis, entry)
    local = _local(entry, axis, local) if algorithm in ("auto", "hierarchical") else 0
    return Options(axis, codecs, scales or SiteScales(), algorithm or "auto", min_bytes, backend, chunks, exchange,
                   link, key, local, between)  # fmt: skip


def _local(entry: str, axis: AxisName, ranks_per_host: int | None) -> int:
    """Ranks of the axis on a host. Raises ValueError where hosts would not have equally many."""
    ranks = lax.axis_size(axis)
    if ranks_per_host is None:
        return hosts.ranks_per_host_here(axis)
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
        if value.shape not in shapes or value.dtype != dtype:
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
