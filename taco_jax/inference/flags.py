"""The flags that every command with a `Generator` has, and the `Compression` and `Generator` that they make."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from taco_jax.compression import chains, plan_file
from taco_jax.compression.compression import Compression, codec_pair
from taco_jax.errors import ConfigError

if TYPE_CHECKING:
    from taco_jax.inference.generator import Generator
    from taco_jax.inference.settings import Planned


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """Which model, and how it runs on its devices."""

    model: str = ""
    """Hugging Face folder or .gguf (docs/inference.md has the families), or a run: runs/x (latest step), runs/x@9."""
    tp: int = 1
    """Tensor-parallel devices."""
    compression: str = "none"
    """Codec of the sums over devices: mxfp4, int4h,block=32... (docs/codecs.md), auto (recommended), or a plan.json."""
    plan: dict[str, str] = dataclasses.field(default_factory=dict)
    """Codecs of single sites, before compression: pairs PATTERN CODEC such as layers/mlp/down int8h."""
    min_bytes: int | None = None
    """Messages below this many bytes are sent exactly; None: as tuned for the link, in decode steps at least 64 KiB."""
    link: str = "auto"
    """How bytes move: auto, nccl (any fabric) or nvlink (peer memory, one kernel)."""
    backend: str = "auto"
    """What encodes and decodes: mosaic or triton (GPU kernels), jnp, or auto."""
    error_feedback: bool | None = None
    """Each sum takes along what the one before it lost; None: codecs below 8 bits do, unless over NVLink kernels."""
    dtype: str = "bfloat16"
    """Type of weights and activations: bfloat16, float32 or float16."""
    devices: str | None = None
    """'cpu:4' emulates four devices on the CPU; 'cpu', 'gpu' or None take what JAX finds."""

    def generator(self) -> Generator:
        """Returns the generator, once the devices are selected. Raises ConfigError as `Generator`."""
        from taco_jax.inference.generator import Generator

        compression = compression_of(self, self.compression, "compression")
        options = {"tp": self.tp, "dtype": self.dtype, "chains": getattr(self, "chains", None)}
        return Generator(self.model, compression=compression, plan=self.plan, **options)

    @property
    def in_order(self) -> bool:
        """Returns whether prompts may go in chains, for which GPUs start kernels in the order of their launch."""
        if self.tp == 1 or chains.on_cpu(self.devices):
            return False
        given = getattr(self, "chains", None)
        return chains.slow_link() is not None if given is None else given > 1


def compression_of(flags: Any, codecs: str, key: str) -> Compression | Planned:
    """Returns the compression in these codecs, or of a plan's file, with all other fields that `flags` has by name.

    Raises:
      ConfigError: a codec, whose key is `key`, a file that is no plan, or another field that cannot be.
    """
    try:
        if plan_file.is_plan_path(codecs):
            from taco_jax.inference.settings import Planned

            return Planned(plan_file.read(codecs), Compression.of_fields(flags, forward="none"))
        forward, backward = codec_pair(codecs, key)
        return Compression.of_fields(flags, forward=forward, backward=backward)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
