"""`Settings`: how inference compresses the sums after row-parallel products (arXiv 2411.09510), each in its own codec.

A codec is written as a preset's name, with fields changed after commas: "mxfp4", "int4h,block=32,scale=e8m0".

The sites are layers/0/attn/out, layers/0/mlp/down, layers/1/attn/out and so on; the patterns of a plan match these
names, and "layers/mlp/down" means that site of all layers. Layers that follow each other and send alike are one
segment, which is compiled as one layer and has one row in the site table.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.formats import ELEMENTS
from taco_jax.codec import Codec
from taco_jax.compression import chains, recommended, tuned
from taco_jax.compression.compression import EXACT, Compression, Plan, as_compression, codec_pair, without_key
from taco_jax.compression.plan_file import PlanFile, is_plan_path, read, shape_of
from taco_jax.compression.site_scales import SiteScales
from taco_jax.config import ConfigError
from taco_jax.models.attention import implementation, why_not_cudnn
from taco_jax.models.config import ModelConfig, validate
from taco_jax.models.decoder import site_names
from taco_jax.models.run_config import Parallel

ROWS = ("attn/out", "mlp/down")
DTYPES = ("bfloat16", "float32", "float16")
EIGHT_BITS = tuple(name for name, element in ELEMENTS.items() if element.bits == 8)
DECODE_MIN_BYTES = 1 << 16
"""A decode step's messages below this are exact where the link's own limit is lower (as on emulated devices): they
are bound by latency, and their bytes do not count beside those of the prompt."""


class Planned(NamedTuple):
    """The plan of a file, and the options that its sites share (its codecs are not looked at)."""

    file: PlanFile
    options: Compression

    def rules(self, config: ModelConfig) -> dict[str, Compression]:
        """Returns the rules of a plan for the sums of `config`'s layers.

        Raises:
          ConfigError: a plan of another model.
        """
        everywhere = [f"layers/{row}" for row in ROWS]
        of_layers = [f"layers/{layer}/{row}" for layer in range(config.n_layers) for row in ROWS]
        families = (of_layers, everywhere, site_names(config, 1))
        named = [] if self.file.model is None else self.file.model["sites"]
        # A trainer's names are more than those of `everywhere`, which are among them.
        sites = max(families, key=lambda family: len(set(family) & set(named)))
        self.file.check_model(shape_of(config), sites)
        # Sums alone are compressed in inference; what a trainer's plan says of gradients and ends is not sent here.
        rows = [name for name in self.file.sites if name in (*everywhere, *of_layers)]
        base = dataclasses.replace(self.options, backward="none")
        rules = {name: self.file.sites[name].compression(base) for name in rows}
        fed = self.options.error_feedback
        if fed is None:
            return rules
        # A flag has the last word.
        return {name: c if c.is_exact else dataclasses.replace(c, error_feedback=fed) for name, c in rules.items()}


class Segment(NamedTuple):
    """Layers start to stop - 1, whose sites' names begin with sites_of."""

    sites_of: str
    start: int
    stop: int


class Chains(NamedTuple):
    """Parts of prompts that go through each layer side by side. dim: what is cut, 0 the batch, 1 the sequences."""

    count: int = 1
    dim: int = 0


class Layout(NamedTuple):
    """How a program runs: its settings, and the segments of layers that its plan names.

    chains: parts of a prompt, where their messages have chain_bytes or more.
    """

    par: Parallel
    segments: tuple[Segment, ...]
    chains: int = 1
    chain_bytes: int = 0

    def chains_of(self, config: ModelConfig, batch: int, length: int) -> Chains:
        """Returns the chains of prompts: parts of the batch if they divide it, else of the sequence."""
        n, nbytes = self.chains, batch * length * config.d_model * jnp.dtype(self.par.dtype).itemsize
        if n == 1 or nbytes < n * self.chain_bytes or (batch % n and length % n):
            return Chains()
        return Chains(n, 1 if batch % n else 0)

    @property
    def error_feedback(self) -> bool:
        """Returns whether any sum takes errors along."""
        return any(c is not None and c.error_feedback for _, c in self.par.plan)

    @property
    def codecs(self) -> str:
        """The codecs of the sums, in words: "int6h with error feedback"; none where all go exactly."""
        fed = lambda c: " with error feedback" if c.error_feedback else ""
        names = [f"{c.codecs[0].name}{fed(c)}" for _, c in self.par.plan if c is not None]
        return ", ".join(dict.fromkeys(names)) or "none"

    def scales(self) -> dict[str, SiteScales]:
        """The site scale 1 for every site whose codec's scale is ue5m3: its byte then spans 2^-15 to 2^16 in steps of
        an eighth, which holds the block scales of any activations, and nothing is calibrated."""
        fixed = lambda c: c is not None and c.codecs[0].scale == "ue5m3"
        return {site: SiteScales(jnp.zeros((2,), jnp.int32)) for site, c in self.par.plan if fixed(c)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model runs on its mesh. compression and plan are as in `taco_jax.Generator`.

    compression: a `Compression` once the object is made, of whatever makes one, or the `Planned` of a plan's file. auto
      is what the record recommends for the first token: another codec where sums take along what the one before lost.
    chains: parts of a prompt that go through each layer side by side; None: as `compression.chains` says of the link.

    Raises:
      ConfigError: a tp or chains below 1, a dtype or a codec that there is not.
    """

    tp: int = 1
    compression: str | Codec | Compression | Planned | None = None
    plan: Mapping[str, str | Codec | Compression | None] = dataclasses.field(default_factory=dict)
    dtype: str = "bfloat16"
    chains: int | None = None

    def __post_init__(self):
        compression = self.compression
        if is_plan_path(compression):
            compression = Planned(read(compression), EXACT)
        if not isinstance(compression, Planned):
            compression = self._in_codecs(EXACT, compression, "compression")
        object.__setattr__(self, "compression", compression)
        if self.tp < 1:
            raise ConfigError(f"tp={self.tp!r}: must be at least 1")
        if self.chains is not None and (type(self.chains) is not int or self.chains < 1):
            raise ConfigError(
                f"chains={self.chains!r}: must be a whole number of at least 1, or None for the link's own"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")

    @property
    def options(self) -> Compression:
        """Returns the options that all sums share, without their codecs where a plan's file has those."""
        return self.compression.options if isinstance(self.compression, Planned) else self.compression

    @property
    def order(self) -> list[int] | None:
        """Returns the order of the residual channels that a plan's file asks for, None where there is none."""
        found = self.compression.file.arrangement if isinstance(self.compression, Planned) else None
        return None if found is None else found["order"]

    def layout(self, config: ModelConfig, device, *, decoding: bool) -> Layout:
        """Returns the layout of the program that takes whole prompts, or of the one that takes a token of each row.

        Raises:
          ConfigError: a codec or a pattern that there is not, or a tp that does not fit the model.
        """
        try:
            validate(config, self.tp)
            of_layers = self._resolve(config, device, decoding)
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from None
        plan: dict[str, Compression | None] = {"embed": None, "head": None}
        segments, start = [], 0
        for both, layers in itertools.groupby(of_layers):
            stop = start + len(list(layers))
            whole = stop - start == config.n_layers
            segments.append(Segment("layers" if whole else f"layers/{start}-{stop - 1}", start, stop))
            enters = ("attn/qkv", "mlp/up")  # their messages are the gradients'
            plan |= {f"{segments[-1].sites_of}/{site}": c for site, c in zip((*ROWS, *enters), (*both, None, None))}
            start = stop
        chosen = "xla" if why_not_cudnn(config) else implementation(device, self.dtype, config.head_dim)
        par = Parallel(plan=plan, dtype=self.dtype, attention_implementation=chosen, frozen=True)
        return Layout(par, tuple(segments), *self._chains(of_layers, device, decoding))

    def _chains(self, of_layers, device, decoding: bool) -> tuple[int, int]:
        """Returns (chains of a prompt, the least bytes of a chain's message)."""
        if decoding or self.tp == 1:
            return 1, 0
        if self.chains is not None:
            return self.chains, 0
        if device.platform != "gpu" or chains.slow_link(device.device_kind) is None:
            return 1, 0
        return chains.CHAINS, chains.least_bytes((c for both in of_layers for c in both), self.tp, device)

    def _resolve(self, config: ModelConfig, device, decoding: bool) -> list[tuple[Compression | None, ...]]:
        """Returns how each layer sends, a value for each of ROWS."""
        n_layers = config.n_layers
        resolved = lambda found: self._resolved(found, device, decoding, can_feed_back=not config.post_norms)
        base = self.options
        rules = {
            pattern: resolved(self._in_codecs(base, value, f"plan {pattern}")) for pattern, value in self.plan.items()
        }
        if isinstance(self.compression, Planned):
            of_file = self.compression.rules(config).items()
            rules |= {name: resolved(compression) for name, compression in of_file if name not in rules}
        rest = resolved(base)
        names = {f"layers/{layer}/{row}": (layer, row) for layer in range(n_layers) for row in ROWS}
        general = [f"layers/{row}" for row in ROWS]
        Plan(rules).resolve([*general, *names])  # refuses what matches nothing

        def lookup(name: str, row: str) -> Compression | None:
            matches = lambda pattern: any(fnmatch.fnmatchcase(n, pattern) for n in (name, f"layers/{row}"))
            return next((c for pattern, c in rules.items() if matches(pattern)), rest)

        return [tuple(lookup(f"layers/{layer}/{row}", row) for row in ROWS) for layer in range(n_layers)]

    @staticmethod
    def _in_codecs(base: Compression, value: str | Codec | Compression | None, key: str) -> Compression:
        """Returns `value`: a Compression as it is, codecs with the other fields of `base`, EXACT for None."""
        try:
            if value is None or isinstance(value, Compression):
                return without_key(value or EXACT)
            if not isinstance(value, str | Codec):
                as_compression(value, key)  # raises
            forward, backward = codec_pair(value, key) if isinstance(value, str) else (value, value)
            return without_key(dataclasses.replace(base, forward=forward, backward=backward))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None

    def _resolved(self, found: Compression, device, decoding: bool, can_feed_back: bool) -> Compression | None:
        """Returns `found` with what it leaves open decided, None where it sends exactly. There are no gradients."""
        fed = found.error_feedback
        if fed is None:
            fed = can_feed_back and _feedback_can_pay(found, device)
        found = found.for_use(recommended.FEEDBACK if fed else recommended.FIRST_TOKEN)
        if found.codecs[0].exact:
            return None
        if found.error_feedback and not can_feed_back:
            raise ConfigError(
                "error_feedback=True: the model normalises its sums, which errors do not pass; leave it out"
            )
        if found.error_feedback is None:
            found = dataclasses.replace(found, error_feedback=can_feed_back and _feedback_pays(found, device))
        if decoding and found.min_bytes is None:
            least = tuned.default_min_bytes(found.codecs[0].name, self.tp, device, found.link)
            found = dataclasses.replace(found, min_bytes=max(least, DECODE_MIN_BYTES))
        return found


def _feedback_pays(compression: Compression, device) -> bool:
    """Returns whether sums take errors along by themselves.

    Codecs below 8 bits need it most. It would keep sums from being one kernel over NVLink.
    """
    return compression.codecs[0].element not in EIGHT_BITS and _feedback_can_pay(compression, device)


def _feedback_can_pay(compression: Compression, device) -> bool:
    """Returns whether sums may take errors along by themselves, in a codec that needs it."""
    return compression.can_feed_back and not tuned.in_one_kernel(device, compression.link)
