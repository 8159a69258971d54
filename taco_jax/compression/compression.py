"""Which site uses which codec pair: `Compression` for one site, `Plan` for a model."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import operator
from collections.abc import Iterable, Mapping

from taco_jax.codec import AUTO, CODECS, Codec, as_codec, check_choice
from taco_jax.compression import recommended
from taco_jax.errors import did_you_mean

ALGORITHMS = ("auto", "one_shot", "two_shot", "hierarchical")
SHOTS = ALGORITHMS[1:3]
LINKS = ("auto", "nccl", "nvlink", "copy")
BACKENDS = ("auto", "mosaic", "triton", "jnp")
EXCHANGES = ("auto", "all_to_all", "ring")
# Every chunk is a few collectives of its own in the program: thousands of them take minutes to compile and never pay.
MAX_CHUNKS = 1024
CHOICES = {"algorithm": ALGORITHMS, "link": LINKS, "backend": BACKENDS, "exchange": EXCHANGES}
# Field: (rule, least, most).
INTEGERS = {
    "chunks": (f"must be an integer from 1 to {MAX_CHUNKS}, or None for the tuned number", 1, MAX_CHUNKS),
    "min_bytes": ("must be an integer of 0 or more bytes, or None for the tuned value", 0),
    "ranks_per_host": ("must be an integer of at least 1, or None for what JAX says of the devices", 1),
}
BACKWARD = "backward_error_feedback"
FEEDBACK_KEYS = ("error_feedback", BACKWARD)
# What error feedback can be used with.
FEEDBACK = {
    "algorithm": ("auto", *SHOTS), "link": ("auto", "nccl"), "backward_link": (None, "auto", "nccl"),
    "between_hosts": (None,),
}  # fmt: skip


def as_integer(key: str, value, rule: str) -> int:
    """A Python int of any integer (numpy's too). Raises TypeError, naming the key, the value and the rule."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{key}={value!r}: is of type {type(value).__name__}; {rule}")


def _integer_or_none(key: str, value, rule: str, least: int, most: int | None = None) -> int | None:
    if value is None:
        return None
    number = as_integer(key, value, rule)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{key}={number}: {rule}")
    return number


def _check_codec(codec: str | Codec, key: str) -> None:
    """Raises ValueError for what is neither a codec nor auto."""
    if isinstance(codec, str) and "," not in codec:
        check_choice(key, codec, (*CODECS, AUTO))
    elif codec != AUTO:
        as_codec(codec, key)


def check_feedback(compression: Compression, entry: str = "error_feedback=True: ") -> None:
    """Raises ValueError for a way of sending that keeps no wires, of which a rank could tell what they lost."""
    for key, valid in FEEDBACK.items():
        value = getattr(compression, key)
        if value not in valid:
            raise ValueError(f"{entry}{key}={value!r} knows no errors; it must be {' or '.join(map(repr, valid))}")


@dataclasses.dataclass(frozen=True)
class Compression:
    """How a message, or every message of a site, is sent. The one object of collectives, layers, models and inference.

        Compression("taco")      Compression("int6h", backward="int8h", link="nccl")

    Checked where it is made. All but `forward` are given by name.

    Args:
      forward, backward: codec of activations and of their gradients: a `Codec`, or a text "PRESET[,FIELD=VALUE...]"
        such as "int4h,block=32". backward None: the same as forward. auto: what the record recommends for the use
        (`taco_jax.compression.recommended`); where that is not known, as in collectives and layers, for training.
      min_bytes: messages below this many bytes go through jax.lax exactly. None: the value tuned for codec and link; 0
        on the emulator.
      algorithm: of what is summed or gathered: two_shot, one_shot, hierarchical (inside hosts, between and inside
        again; with one host, or one rank on each, it is as auto would be there), or auto: hierarchical where the axis
        spans several hosts and the message is large (on CPU always), else the algorithm that was measured as the faster
        one on this link (`python -m taco_jax.tune`), and without a measurement one_shot for two ranks, two_shot for
        more.
      between_hosts: codec of what a hierarchical message sends between hosts, in both directions; None: the
        message's own.
      ranks_per_host: consecutive ranks of the axis that share a host; None: as JAX says of `jax.devices()`, if the mesh
        is of all of them in their own order, else all ranks (a region's mesh does not know its devices).
      link: nccl (kernels around NCCL's collectives), nvlink (one kernel that writes into peers' memory; raises
        KernelUnavailableError where it cannot), copy (kernels around a copy by the GPUs' copy engines, for sums of two
        ranks of one process; `taco_jax.collectives.peer_copy`), or auto, which takes nvlink where one process drives
        Hopper GPUs that have it.
      backward_link: link of backward messages; None: as `link`.
      backend: what encodes and decodes: mosaic, triton (GPU kernels), jnp, or auto, which takes a kernel where there is
        one. A backend that is forced and cannot run raises `pallas_kernels.KernelUnavailableError` when it is traced.
      chunks: pieces of a message, 1 to 1024, that travel one after the other, so that encoding the next overlaps with
        sending this one. The values are those of one piece, with two exceptions: stochastic rounding draws other noise,
        and with scale="site" and no calibrated exponent each piece has a scale of its own. None: the number tuned for
        the link, 1 where nothing was tuned.
      exchange: how a message that sends another wire to every rank does it: all_to_all, or ring (P-1 permutations;
        experimental: no measurement shows it faster); auto: as tuned, else all_to_all. The values are the same.
      with_product: a layer's sum goes into the kernel of the product before it, where it goes over NVLink and both can
        (`taco_jax.collectives.matmul_psum`). Collectives by themselves ignore it.
      error_feedback: a decoder's row-parallel sum takes the error of the one before it along, and leaves its own to the
        next (`taco_jax.collectives.error_feedback`). Collectives by themselves ignore it. None: no, but that inference
        uses it with codecs below 8 bits where sums can.
      backward_error_feedback: experimental: a decoder's sum of input gradients takes the error of the one before it
        along too, as terms of the residual stream's gradient, behind the normalisation. Collectives by themselves
        ignore it.

    Raises:
      ValueError, TypeError: a value that cannot be, in one line that names the field and what is valid.
    """

    forward: str | Codec = AUTO
    _: dataclasses.KW_ONLY
    backward: str | Codec | None = None
    min_bytes: int | None = None
    algorithm: str = "auto"
    link: str = "auto"
    backward_link: str | None = None
    backend: str = "auto"
    chunks: int | None = None
    exchange: str = "auto"
    between_hosts: str | Codec | None = None
    ranks_per_host: int | None = None
    with_product: bool = False
    error_feedback: bool | None = None
    backward_error_feedback: bool = False

    def __new__(cls, *args, **fields):
        """Raises TypeError, with the new spelling, for what was taken by position or by another name before."""
        names = [field.name for field in dataclasses.fields(cls)]
        old = dict(zip(names[1:], args[1:])) | {key: fields[key] for key in fields.keys() & {"codec", "backward_codec"}}
        if old:
            text = ", ".join(f"{key}={value!r}" for key, value in old.items())
            first = (*args, old.pop("codec", fields.get("forward", "taco")))[0]
            kept = {key: value for key, value in fields.items() if key in names[1:]}
            raise TypeError(f"Compression: {text}: all but the first are given by name: {_spelled(first, old | kept)}")
        return super().__new__(cls)

    def __post_init__(self):
        put = functools.partial(object.__setattr__, self)
        for key in ("forward", "backward", "between_hosts"):
            if not isinstance(getattr(self, key), Codec | str | None):
                raise TypeError(f"{key}={getattr(self, key)!r}: must be a preset's name or a Codec")
        if self.forward is None:
            put("forward", "none")
        if self.backward is None:
            put("backward", self.forward)
        for key in ("forward", "backward"):
            if isinstance(codec := getattr(self, key), str) and ":" in codec:
                forward, backward = codec_pair(codec, key)
                raise ValueError(f"{key}={codec!r}: is a pair; say Compression({forward!r}, backward={backward!r})")
            _check_codec(codec, key)
        for key, valid in CHOICES.items():
            check_choice(key, getattr(self, key), valid)
        if self.backward_link is not None:
            check_choice("backward_link", self.backward_link, LINKS)
        for key, rule in INTEGERS.items():
            put(key, _integer_or_none(key, getattr(self, key), *rule))
        switches = (("with_product", bool, ""), ("error_feedback", bool | None, ", or None"), (BACKWARD, bool, ""))
        for key, valid, rule in switches:
            if not isinstance(getattr(self, key), valid):
                raise TypeError(f"{key}={getattr(self, key)!r}: must be True or False{rule}")
        self._check_between_hosts()
        for key in FEEDBACK_KEYS:
            if getattr(self, key):
                check_feedback(self, f"{key}=True: ")
                if self.with_product:
                    raise ValueError(f"{key}=True: with_product=True knows no errors; use one of the two")

    def _check_between_hosts(self) -> None:
        if self.between_hosts is None:
            return
        given = f"between_hosts={self.between_hosts!r}: "
        if as_codec(self.between_hosts, "between_hosts").exact:
            rule = "must be a codec that compresses, such as 'int4h', or None for the message's own"
            raise ValueError(given + rule)
        if self.algorithm in SHOTS:
            rule = (
                f"algorithm={self.algorithm!r} sends everything in one codec; use 'auto' or 'hierarchical', or leave "
            )
            raise ValueError(f"{given}{rule}between_hosts out")

    @classmethod
    def of_fields(cls, settings: object, **changes) -> Compression:
        """Returns the compression that takes each field that `settings` has of the same name, and the changes."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: getattr(settings, name) for name in names if hasattr(settings, name)} | changes)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """The codecs of the forward and of the backward message; of auto, those for training."""
        of = self.for_use(recommended.TRAINING)
        return as_codec(of.forward), as_codec(of.backward)

    def for_use(self, use: str) -> Compression:
        """Returns this compression with the codecs that are recommended for a use in the place of auto."""
        directions = {key: getattr(self, key) for key in ("forward", "backward")}
        named = {key: recommended.resolved(codec, use, key) for key, codec in directions.items()}
        return self if named == directions else dataclasses.replace(self, **named)

    @property
    def between(self) -> Codec | None:
        """The codec between hosts, None where it is the message's own."""
        return None if self.between_hosts is None else as_codec(self.between_hosts)

    @property
    def can_feed_back(self) -> bool:
        """Returns whether sums sent in this way leave an error that a later one can take along."""
        return not self.with_product and all(getattr(self, key) in valid for key, valid in FEEDBACK.items())

    @property
    def knows_products(self) -> bool:
        """Returns whether a layer's sums are joined with its products (`taco_jax.collectives.matmul_psum`)."""
        return self.with_product or "copy" in (self.link, self.backward_link)

    @property
    def is_exact(self) -> bool:
        """Returns whether both directions are jax.lax's own."""
        return all(codec.exact for codec in self.codecs)


EXACT = Compression("none")


def codec_pair(text: str, key: str = "compression") -> tuple[str, str]:
    """Returns the (forward, backward) codecs of "CODEC", for both directions, or of "FORWARD:BACKWARD"; auto stays.

    Raises:
      ValueError: a text that is no codec to `as_codec`, or an empty one beside a colon; it begins with `key`.
    """
    forward, colon, backward = text.partition(":")
    if colon and not (forward and backward):
        raise ValueError(
            f"{key}={text!r}: lacks a codec beside ':'; must be CODEC or FORWARD:BACKWARD, such as taco:int8h"
        )
    if ":" in backward:
        raise ValueError(f"{key}={text!r}: has more than two codecs; must be CODEC or FORWARD:BACKWARD")
    for codec in (forward, backward) if colon else (forward,):
        _check_codec(codec, key)
    return forward, backward or forward


def as_compression(compression: str | Codec | Compression | None, key: str = "compression") -> Compression | None:
    """Returns the Compression of a `Compression`, a codec or a text; None where it sends everything exactly.

    A text is one of `codec_pair`. Of auto, the codecs for training.

    Raises:
      ValueError: a text that names no codec; it begins with `key`.
      TypeError: something else.
    """
    if isinstance(compression, str):
        forward, backward = codec_pair(compression, key)
        compression = Compression(forward, backward=backward)
    elif isinstance(compression, Codec):
        compression = Compression(compression)
    elif not isinstance(compression, Compression | None):
        raise TypeError(f"{key}={compression!r}: must be a preset's name, a Codec, a Compression or None")
    return None if compression is None or compression.is_exact else compression.for_use(recommended.TRAINING)


def without_key(compression: Compression | None) -> Compression | None:
    """Returns the compression of a layer, which has no key to draw noise with.

    Raises:
      ValueError: a codec with rounding="stochastic".
    """
    for key in ("forward", "backward", "between_hosts") if compression is not None else ():
        if getattr(compression, key) != AUTO and as_codec(getattr(compression, key)).rounding == "stochastic":
            raise ValueError(
                f"{key}={getattr(compression, key)}: a layer has no key for rounding='stochastic'; use 'nearest', or "
                "the collectives of taco_jax with key="
            )
    return compression


def refuse_options(entry: str, given: Mapping[str, object], options: Iterable[str]) -> None:
    """Raises TypeError, with the new spelling, where keyword arguments are options once taken beside `compression`."""
    old = {key: given[key] for key in options if key in given}
    if old:
        text = ", ".join(f"{key}={value!r}" for key, value in old.items())
        compression = given.get("compression", "taco")
        first = old.pop("codec", "none" if compression is None else compression)
        raise TypeError(f"{entry}: {text}: options are one object now: {_spelled(first, old)}")


def _spelled(first: object, fields: dict) -> str:
    """Returns the text compression=... of what `compression` was and of fields, some of them by their old names."""
    fields = {"backward" if key == "backward_codec" else key: value for key, value in fields.items()}
    if not fields:
        return f"compression={first!r}"
    if isinstance(first, Compression):
        changes = ", ".join(f"{key}={value!r}" for key, value in fields.items())
        return f"compression=dataclasses.replace({first!r}, {changes})"
    if isinstance(first, str) and ":" in first:
        first, fields["backward"] = codec_pair(first)
    given = [repr(first), *(f"{key}={value!r}" for key, value in fields.items())]
    return f"compression=Compression({', '.join(given)})"


class Plan:
    """Patterns of site names -> Compression (or what `as_compression` takes). The first match wins.

        Plan({"layers/*/down": Compression("int6h", backward="taco"), "head": None, "*": "int8h:taco"})

    Patterns are shell-style (`fnmatch`). A site that no pattern matches takes
    `default` (None: exact); a pattern that matches no site is an error.
    """

    def __init__(self, rules: Mapping[str, str | Compression | None], default: str | Compression | None = None):
        if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
            raise TypeError(f"plan={rules!r}: must be a mapping of patterns, such as {{'layers/mlp/*': 'int8h'}}")
        self.default = without_key(as_compression(default))
        self.rules = {
            pattern: without_key(as_compression(value, f"plan {pattern!r}: compression"))
            for pattern, value in rules.items()
        }

    def resolve(self, site_names: Iterable[str]) -> dict[str, Compression | None]:
        """The compression of every site. Raises ValueError for a pattern that matches none, naming the nearest site."""
        names = list(site_names)
        for pattern in self.rules:
            if not [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
                hint = did_you_mean(pattern, names, otherwise="", cutoff=0.3)
                if pattern.startswith(("pp/", "dp/")):
                    hint = "stages have pipeline.forward and .backward, gradients data_parallel.gradients;"
                hint = f"{hint} " if hint else ""
                raise ValueError(f"plan pattern {pattern!r} matches no site: {hint}sites are {', '.join(names)}")
        return {name: self._lookup(name) for name in names}

    def _lookup(self, name: str) -> Compression | None:
        return next((c for pattern, c in self.rules.items() if fnmatch.fnmatchcase(name, pattern)), self.default)
