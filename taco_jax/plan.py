"""Which site uses which codec pair: `Compression` for one site, `Plan` for a model."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import operator
from collections.abc import Iterable, Mapping

from taco_jax.codec import Codec, as_codec, check_choice

ALGORITHMS = ("auto", "one_shot", "two_shot", "hierarchical")
SHOTS = ALGORITHMS[1:3]
LINKS = ("auto", "nccl", "nvlink")
BACKENDS = ("auto", "mosaic", "triton", "jnp")
EXCHANGES = ("auto", "all_to_all", "ring")
# Every chunk is a few collectives of its own in the program: thousands of them take minutes to compile and never pay.
MAX_CHUNKS = 1024


def as_integer(key: str, value, rule: str) -> int:
    """A Python int of any integer (numpy's too). Raises TypeError, naming the key, the value and the rule."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{key}={value!r}: is of type {type(value).__name__}; {rule}")


def check_transport(algorithm, link, backend, exchange, chunks, min_bytes) -> tuple[int | None, int | None]:
    """(chunks, min_bytes) as Python ints or None.

    Raises ValueError or TypeError for a way of sending that there is not, naming the key and what is valid.
    """
    for key, value, valid in (
        ("algorithm", algorithm, ALGORITHMS),
        ("link", link, LINKS),
        ("backend", backend, BACKENDS),
        ("exchange", exchange, EXCHANGES),
    ):
        check_choice(key, value, valid)
    if chunks is not None:
        rule = f"must be an integer from 1 to {MAX_CHUNKS}, or None for the tuned number"
        chunks = as_integer("chunks", chunks, rule)
        if not 1 <= chunks <= MAX_CHUNKS:
            raise ValueError(f"chunks={chunks}: {rule}")
    if min_bytes is not None:
        rule = "must be an integer of 0 or more bytes, or None for the tuned value"
        min_bytes = as_integer("min_bytes", min_bytes, rule)
        if min_bytes < 0:
            raise ValueError(f"min_bytes={min_bytes}: {rule}")
    return chunks, min_bytes


def check_levels(algorithm: str, ranks_per_host, between_hosts) -> tuple[int | None, Codec | None]:
    """(ranks_per_host, between_hosts) as a Python int or None and a Codec or None.

    Raises ValueError or TypeError for what cannot be, naming the key and what is valid.
    """
    if ranks_per_host is not None:
        rule = "must be an integer of at least 1, or None for what JAX says of the devices"
        ranks_per_host = as_integer("ranks_per_host", ranks_per_host, rule)
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host={ranks_per_host}: {rule}")
    if between_hosts is None:
        return ranks_per_host, None
    codec = as_codec(between_hosts, "between_hosts")
    if codec.exact:
        raise ValueError(
            f"between_hosts={between_hosts!r}: must be a codec that compresses, such as 'int4h', or None for the "
            "message's own"
        )
    if algorithm in ("one_shot", "two_shot"):
        raise ValueError(
            f"between_hosts={between_hosts!r}: algorithm={algorithm!r} sends everything in one codec; use 'auto' or "
            "'hierarchical', or leave between_hosts out"
        )
    return ranks_per_host, codec


def check_feedback(algorithm: str, link: str, between_hosts, entry: str = "error_feedback=True: ") -> None:
    """Raises ValueError for a way of sending that keeps no wires, of which a rank could tell what they lost."""
    for key, value, valid in (
        ("algorithm", algorithm, ("auto", "one_shot", "two_shot")),
        ("link", link, ("auto", "nccl")),
        ("between_hosts", between_hosts, (None,)),
    ):
        if value not in valid:
            raise ValueError(f"{entry}{key}={value!r} knows no errors; it must be {' or '.join(map(repr, valid))}")


@dataclasses.dataclass(frozen=True)
class Compression:
    """How one site communicates.

    Args:
      forward, backward: codec (preset name or `Codec`) of activations and of their gradients.
      min_bytes: messages below this many bytes go through jax.lax exactly. None: the value tuned for the link.
      algorithm: two_shot, one_shot, hierarchical (inside hosts, between and inside again; with one host, or one rank
        on each, it is as auto would be there), or auto: hierarchical where the axis spans several hosts and the message
        is large, else the algorithm that was measured as the faster one on this link (`python -m taco_jax.tune`), and
        without a measurement the exchange for two ranks, two_shot for more.
      between_hosts: codec of what a hierarchical message sends between hosts, in both directions; None: the
        message's own.
      ranks_per_host: consecutive ranks of the axis that share a host; None: as JAX says of the devices.
      link: nccl (kernels around NCCL's collectives), nvlink (one kernel that writes into peers' memory; raises
        KernelUnavailableError where it cannot), or auto, which takes nvlink where one process drives Hopper GPUs that
        have it.
      backend: what encodes and decodes: mosaic, triton (GPU kernels), jnp, or auto, which takes a kernel where there is
        one. A backend that is forced and cannot run raises `pallas_kernels.KernelUnavailableError` when it is traced.
      chunks: pieces of a message, 1 to 1024, that travel one after the other, so that encoding the next overlaps with
        sending this one; the values are the same, but with scale="site" as long as the site is not calibrated (each
        piece then has a scale of its own). None: the number tuned for the link, 1 where nothing was tuned.
      exchange: first hop of a reduction as one all_to_all, or as a ring of P-1 permutations; auto: as tuned.
      with_product: a sum goes into the kernel of the product before it, where it goes over NVLink and both can
        (`taco_jax.collectives.products`).
      error_feedback: a decoder's row-parallel sum takes the error of the one before it along, and leaves its own to the
        next (`taco_jax.collectives.feedback`).
    """

    forward: str | Codec = "taco"
    backward: str | Codec = "taco"
    min_bytes: int | None = None
    algorithm: str = "auto"
    link: str = "auto"
    backend: str = "auto"
    chunks: int | None = None
    exchange: str = "auto"
    between_hosts: str | Codec | None = None
    ranks_per_host: int | None = None
    with_product: bool = False
    error_feedback: bool = False

    def __post_init__(self):
        for key in ("with_product", "error_feedback"):
            if not isinstance(getattr(self, key), bool):
                raise TypeError(f"{key}={getattr(self, key)!r}: must be True or False")
        if self.error_feedback:
            check_feedback(self.algorithm, self.link, self.between_hosts)
            if self.with_product:
                raise ValueError("error_feedback=True: with_product=True knows no errors; use one of the two")
        for key in ("forward", "backward", "between_hosts"):
            if as_codec(getattr(self, key), key).rounding == "stochastic":
                raise ValueError(
                    f"{key}={getattr(self, key)}: a layer has no key for rounding='stochastic'; use 'nearest', or the "
                    "collectives of taco_jax with key="
                )
        chunks, min_bytes = check_transport(
            self.algorithm, self.link, self.backend, self.exchange, self.chunks, self.min_bytes
        )
        ranks_per_host, _ = check_levels(self.algorithm, self.ranks_per_host, self.between_hosts)
        object.__setattr__(self, "ranks_per_host", ranks_per_host)
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "min_bytes", min_bytes)

    @property
    def is_exact(self) -> bool:
        return as_codec(self.forward).exact and as_codec(self.backward).exact


def as_compression(compression: str | Codec | Compression | None) -> Compression | None:
    """A preset name or codec (for both directions), a `Compression`, or None (exact) -> Compression or None."""
    if compression is None or isinstance(compression, Compression):
        return None if compression is None or compression.is_exact else compression
    codec = as_codec(compression)
    return None if codec.exact else Compression(compression, compression)


class Plan:
    """Patterns of site names -> Compression (or preset name, or None for exact). The first match wins.

        Plan({"layers/*/down": Compression("int6h", "taco"), "head": None, "*": "taco"})

    Patterns are shell-style (`fnmatch`). A site that no pattern matches takes
    `default` (None: exact); a pattern that matches no site is an error.
    """

    def __init__(self, rules: Mapping[str, str | Compression | None], default: str | Compression | None = None):
        self.default = as_compression(default)
        self.rules = {pattern: as_compression(value) for pattern, value in rules.items()}

    def resolve(self, site_names: Iterable[str]) -> dict[str, Compression | None]:
        """The compression of every site. Raises ValueError for a pattern that matches none, naming the nearest site."""
        names = list(site_names)
        for pattern in self.rules:
            if not [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
                near = difflib.get_close_matches(pattern, names, 1, 0.3)
                hint = f"did you mean {near[0]!r}? " if near else ""
                if pattern.startswith(("pp/", "dp/")):
                    hint = "stages have pipeline.forward and .backward, gradients data_parallel.gradients; "
                raise ValueError(f"plan pattern {pattern!r} matches no site: {hint}sites are {', '.join(names)}")
        return {name: self._lookup(name) for name in names}

    def _lookup(self, name: str) -> Compression | None:
        return next((c for pattern, c in self.rules.items() if fnmatch.fnmatchcase(name, pattern)), self.default)
