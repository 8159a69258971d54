"""A collective's call: its arguments checked, and what they leave open decided for each direction's message."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.dispatch import region_device
from taco_jax.codec import Codec, as_codec
from taco_jax.collectives import topology
from taco_jax.collectives.manual_region import AxisName, check_axis, check_region
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.vjp import probing
from taco_jax.compression import timings, tuned
from taco_jax.compression.compression import EXACT, SHOTS, Compression, as_compression
from taco_jax.compression.site_scales import STATS_WIDTH, SiteScales
from taco_jax.compression.timings import Row, Way

DIRECTIONS = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Call:
    """The checked arguments of a collective. local: ranks of a host where messages may go in levels, else 0."""

    axis: AxisName
    compression: Compression
    scales: SiteScales
    key: jax.Array | None
    local: int = 0

    def message(
        self, label: Label, shape: tuple[int, ...], nbytes: int, *, operation: str = "psum", one_kernel: bool = True
    ) -> Message:
        """The message of an x of this shape in label's direction, with what is left to the tuned values decided for its
        size.

        operation: what the message is, by jax.lax's name. one_kernel: it may be one kernel over NVLink.
        """
        c, ranks = self.compression, lax.axis_size(self.axis)
        codec = c.codecs[DIRECTIONS.index(label.direction)].of(shape)
        least, chunks, exchange = c.min_bytes, c.chunks, c.exchange
        rows = self._times(codec, ranks, operation)
        found = self._way(rows, nbytes, one_kernel) if rows and nbytes else None
        if least is None and not codec.exact and not rows:
            least = self._least(codec, ranks, operation)
        small = bool(rows) and found is None if least is None else nbytes < least
        if nbytes == 0 or small:
            # Not a call of jax.lax here: the custom_vjp also names the output for remat and lists both directions.
            codec, found = as_codec("none"), None
        fastest = self._fastest(codec, ranks, nbytes) if operation == "psum" and not rows else None
        if not codec.exact and (chunks is None or exchange == "auto"):
            measured = found[0][2:] if found else tuned.transport(codec.name, ranks, nbytes)
            chunks = (fastest or measured)[0] if chunks is None else chunks
            exchange = measured[1] if exchange == "auto" else exchange
        if self.local == 1 < ranks and c.between is not None and not codec.exact:
            codec = c.between
        algorithm, local, between = self._levels(codec, ranks, nbytes)
        algorithm, why = (algorithm, "") if fastest is None else fastest[1:]
        if found and algorithm == "auto":
            algorithm, why = found[0].algorithm, f"the fastest one at {found[1]:,} bytes, {_as_tuned(ranks)}"
        slot = self.scales.slot
        return Message(
            self.axis, c, codec, label, algorithm=algorithm, why=why, chunks=chunks or 1, exchange=exchange,
            local=local, between=between, with_stats=slot is not None and slot.shape[-1] == STATS_WIDTH,
            separate=bool(found) and found[0].link == "nccl",
        )  # fmt: skip

    def _times(self, codec: Codec, ranks: int, operation: str) -> tuple[Row, ...]:
        """The times of the operation among the ranks of one host; () where it was not timed."""
        if codec.exact or (self.local or topology.ranks_per_host_here(self.axis)) != ranks:
            return ()
        found = tuned.find(codec.name, ranks)
        return () if found is None else found.times.get(operation, ())

    def _way(self, rows: Sequence[Row], nbytes: int, one_kernel: bool) -> tuple[Way, int] | None:
        """(way, the size that says so) of a message of a codec, None where it goes exactly."""
        c = self.compression
        on_link = tuned.allowed(region_device(), c.link, one_kernel)

        def allowed(way: Way) -> bool:
            return on_link(way) and (c.algorithm not in SHOTS or way.algorithm in (c.algorithm, "auto"))

        return timings.decide(rows, nbytes, allowed, forced=c.min_bytes is not None)

    def _least(self, codec: Codec, ranks: int, operation: str) -> int:
        """The size from which a message pays of which no times say how it goes."""
        link, found = self.compression.link, tuned.find(codec.name, ranks)
        least = tuned.default_min_bytes(codec.name, ranks, link=link)
        # A file of before, to which the times of other operations were added, still says it of sums.
        if found is None or not found.times or (operation == "psum" and "psum" not in found.times):
            return least
        # Of a link whose sums were timed, and this operation not.
        on_link = "nccl" if operation in ("all_to_all", "ppermute") else link
        return max(least, tuned.untuned_min_bytes(region_device(), on_link))

    def _fastest(self, codec: Codec, ranks: int, nbytes: int) -> tuple[int, str, str] | None:
        """(chunks, algorithm, why) of a sum on one host that leaves its algorithm open, None where nothing says."""
        if codec.exact or self.local != ranks or self.compression.algorithm not in ("auto", "hierarchical"):
            return None
        if (found := tuned.winner(codec.name, ranks, nbytes)) is None:
            return None
        at, chunks, algorithm = found
        return chunks, algorithm, f"the faster one at {at:,} bytes, {_as_tuned(ranks)}"

    def _levels(self, codec: Codec, ranks: int, nbytes: int) -> tuple[str, int, Codec | None]:
        """(algorithm, ranks of a host or 0, codec between hosts) of one direction's message."""
        algorithm = self.compression.algorithm
        small = algorithm == "auto" and nbytes < tuned.hierarchical_min_bytes()
        if codec.exact or small or self.local in (0, 1, ranks):
            return "auto" if algorithm == "hierarchical" else algorithm, 0, None
        return "hierarchical", self.local, self.compression.between or codec


def _as_tuned(ranks: int) -> str:
    return f"as tuned for {ranks} ranks of this link"


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
