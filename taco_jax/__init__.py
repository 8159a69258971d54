"""taco_jax: compressed tensor parallelism in JAX. `CompressedDense`, compressed collectives, and a trainer.

Importing this package starts no backend, sets no flag and prints nothing.
"""

import importlib

from taco_jax.codec import CODECS, UNCALIBRATED, Codec
from taco_jax.collectives import all_gather, all_to_all, copy, ppermute, psum, psum_scatter, psum_with_feedback
from taco_jax.compression.compression import Compression, Plan
from taco_jax.compression.site_scales import SiteScales, update_scales

__version__ = "0.1.0"

__all__ = [
    "CODECS", "UNCALIBRATED", "AmaxSlot", "Codec", "CompressedDense", "Compression", "Generator", "Plan",
    "SiteScaleState", "SiteScales",
    "all_gather", "all_to_all", "calibrated", "compressed", "copy", "dot", "dot_general", "install", "load_run",
    "ppermute", "psum", "psum_scatter", "psum_with_feedback", "update_scales",
]  # fmt: skip

# Imported only by who asks for it: Flax comes with the layers, the models with the generator.
_LAZY = dict.fromkeys(("AmaxSlot", "CompressedDense", "SiteScaleState"), "taco_jax.nn.nnx") | {
    "Generator": "taco_jax.inference.generator", "load_run": "taco_jax.inference.run_folder",
    "dot": "taco_jax.nn.dot", "dot_general": "taco_jax.nn.dot",
    "calibrated": "taco_jax.dropin", "compressed": "taco_jax.dropin", "install": "taco_jax.dropin",
}  # fmt: skip
_FORMER = {"SiteScale": "SiteScaleState"}  # names that programs may still have
_MODULES = ("linen", "tensor_parallel")


def __getattr__(name: str):
    name = _FORMER.get(name, name)
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"taco_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
