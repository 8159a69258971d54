"""Kinds of GPU that kernels are compiled for without one (kernel_targets.py): their limits, and tracing for them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of GPU: one card's name, and its multiprocessors' limits by compute capability (CUDA's programming guide,
    "Technical Specifications per Compute Capability"); memory in KiB."""

    device: str
    multiprocessors: int
    warps: int
    blocks: int
    shared: int
    shared_of_block: int
    tensor_columns: int = 0  # of tensor memory

    def resident(self, warps: int, registers: int, shared: int, tensor_columns: int = 0) -> int:
        """Returns how many programs of so many warps, registers a thread and bytes a multiprocessor holds at once."""
        if shared > self.shared_of_block * 1024:
            return 0
        by_registers = 65536 // (256 * -(-registers * 32 // 256)) // 4 * 4 // warps  # warps come in fours
        by_shared = self.shared * 1024 // (128 * -(-(shared + 1024) // 128))  # each block has 1 KiB of the system's
        by_tensor = self.tensor_columns // tensor_columns if tensor_columns else self.blocks
        return min(by_registers, by_shared, by_tensor, self.warps // warps, self.blocks)


TARGETS = {
    80: Target("NVIDIA A100-SXM4-80GB", 108, 64, 32, 164, 163),
    86: Target("NVIDIA GeForce RTX 3090", 82, 48, 16, 100, 99),
    87: Target("NVIDIA Orin", 16, 48, 16, 164, 163),
    89: Target("NVIDIA GeForce RTX 4090", 128, 48, 24, 100, 99),
    90: Target("NVIDIA H100 80GB HBM3", 132, 64, 32, 228, 227),
    100: Target("NVIDIA B200", 148, 64, 32, 228, 227, 512),
    103: Target("NVIDIA B300", 148, 64, 32, 228, 227, 512),
    110: Target("NVIDIA Thor", 20, 48, 24, 228, 227, 512),
    120: Target("NVIDIA GeForce RTX 5090", 170, 48, 24, 100, 99),
    121: Target("NVIDIA GB10", 48, 48, 24, 100, 99),
}
MAIN = (80, 86, 89, 90, 100, 120)
MOSAIC = (90, 100)


def architecture(capability: int) -> str:
    """Returns what jaxlib and XLA assemble for."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


@contextlib.contextmanager
def on_target(capability: int) -> Iterator[None]:
    """Traces for a GPU of this compute capability, known by its name alone, as in a mesh of another machine."""
    target = TARGETS[capability]
    device = AbstractDevice(device_kind=target.device, num_cores=target.multiprocessors, platform="gpu")
    mesh = AbstractMesh((1,), ("tp",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
