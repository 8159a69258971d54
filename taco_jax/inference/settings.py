"""What inference compresses: the sums after row-parallel products (arXiv 2411.09510), each with a codec of its own.

A codec is written as a preset's name, with fields changed after commas: "mxfp4", "int4h,block=32,scale=e8m0".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from taco_jax import tuned
from taco_jax.codec import Codec, as_codec
from taco_jax.config import ConfigError, nearest
from taco_jax.models import decoder
from taco_jax.models.config import ModelConfig, validate
from taco_jax.models.parallel import Parallel
from taco_jax.plan import Compression, Plan

ROW_SITES = ("layers/attn/out", "layers/mlp/down")
DTYPES = ("bfloat16", "float32", "float16")
DECODE_MIN_BYTES = 1 << 16
"""A decode step's messages below this are exact where the link's own limit is lower (as on emulated devices): they
are bound by latency, and their bytes do not count beside those of the prompt."""


def parse_codec(text: str, key: str = "compression") -> Codec:
    """The codec of "PRESET[,FIELD=VALUE...]". Raises ConfigError, naming key, value and what would work."""
    name, *changes = text.split(",")
    fields: dict[str, Any] = {}
    for change in changes:
        field, _, value = change.partition("=")
        known = [f.name for f in dataclasses.fields(Codec)]
        if field not in known or not value:
            raise ConfigError(f"{key}={text!r}: {change!r} must be FIELD=VALUE; {nearest(field, known)}")
        fields[field] = int(value) if value.isdigit() else value
    try:
        return dataclasses.replace(as_codec(name, key), **fields)
    except ValueError as error:
        raise ConfigError(f"{key}={text!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model runs on its mesh. compression, plan and min_bytes as of `taco_jax.Generator`."""

    tp: int = 1
    compression: str | Codec | Compression | None = None
    plan: Mapping[str, str | Codec | Compression | None] = dataclasses.field(default_factory=dict)
    min_bytes: int | None = None
    dtype: str = "bfloat16"
    link: str = "auto"
    backend: str = "auto"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")

    def parallel(self, config: ModelConfig, device, *, decoding: bool) -> Parallel:
        """The settings of the program that takes whole prompts, or of the one that takes a token of each row."""
        try:
            sites = decoder.site_names(validate(config, self.tp), self.tp)
            rules = {pattern: self._compression(value, f"plan {pattern}", device, decoding)
                     for pattern, value in self.plan.items()}  # fmt: skip
            rest = self._compression(self.compression, "compression", device, decoding)
            own = [site for site in ROW_SITES if site not in rules]
            resolved = Plan(rules | dict.fromkeys(own, rest)).resolve(sites)
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from None
        return Parallel(plan=resolved, dtype=self.dtype)

    def _compression(self, value, key: str, device, decoding: bool) -> Compression | None:
        codec = parse_codec(value, key) if isinstance(value, str) else value
        if codec is None or (isinstance(codec, Codec) and codec.exact):
            return None
        if not isinstance(codec, Compression):
            codec = Compression(codec, codec, self.min_bytes, link=self.link, backend=self.backend)
        if decoding and codec.min_bytes is None:
            name = as_codec(codec.forward).name
            least = max(tuned.default_min_bytes(name, self.tp, device, codec.link), DECODE_MIN_BYTES)
            codec = dataclasses.replace(codec, min_bytes=least)
        return codec
