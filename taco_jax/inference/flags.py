"""The settings that every command with a `Generator` has, and the generator that they make. Imports no jax."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taco_jax.inference.generator import Generator


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """Which model, and how it runs on its devices."""

    model: str = ""
    """Hugging Face folder (config.json, tokenizer.json, safetensors) of GPT-2, Llama, Qwen2, Qwen3; or a .gguf file."""
    tp: int = 1
    """Tensor-parallel devices."""
    compression: str = "none"
    """Codec of the sums over devices: mxfp4, int8h... (docs/codecs.md), fields changed after commas: int4h,block=32."""
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
        """Once the devices are selected. Raises ConfigError as `Generator`."""
        from taco_jax.inference.generator import Generator

        return Generator(
            self.model, tp=self.tp, compression=self.compression, plan=self.plan, min_bytes=self.min_bytes,
            dtype=self.dtype, link=self.link, backend=self.backend, error_feedback=self.error_feedback,
        )  # fmt: skip
