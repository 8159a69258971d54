"""taco_jax: compressed tensor parallelism in JAX. `CompressedDense`, compressed collectives, and a trainer.

Importing this package starts no backend, sets no flag and prints nothing.
"""

from taco_jax.codec import CODECS, UNCALIBRATED, Codec
from taco_jax.collectives import all_gather, all_to_all, copy, ppermute, psum, psum_scatter
from taco_jax.plan import Compression, Plan
from taco_jax.scales import SiteScales, update_scales

__version__ = "0.1.0"

__all__ = [
    "CODECS", "UNCALIBRATED", "Codec", "Compression", "Plan", "SiteScales", "all_gather", "all_to_all", "copy",
    "ppermute", "psum", "psum_scatter", "update_scales",
]  # fmt: skip

# Flax is imported only by who asks for its layers.
_LAYERS = ("AmaxSlot", "CompressedDense", "SiteScale")


def __getattr__(name: str):
    if name in _LAYERS:
        from taco_jax import layers

        return getattr(layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAYERS})
