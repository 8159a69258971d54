"""The link of each site's sums, where the configuration leaves it open, and how XLA compiles the sums that are copied.

Two GPUs joined by NVLink have two fast ways. One kernel sends and sums at the same time, on all multiprocessors: what
comes next waits for it. Copy engines take no multiprocessor, but encoding and summing are kernels around the copy. So
sums beside which there is much to compute are copied (`taco_jax.collectives.peer_copy`): those of input gradients,
whose weights' gradients wait for nothing. Sums of the forward pass take one kernel. Measured in
experiments/results/step_nvlink_2gpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels import nvlink
from pallas_kernels.nvlink import hardware
from taco_jax.collectives import matmul_psum, peer_copy
from taco_jax.compression import chains as rule
from taco_jax.compression import copies
from taco_jax.compression.compression import Compression
from taco_jax.config import TrainConfig, chains, microbatch, sequence_parallel

# Whether the mlp's sum of the forward pass goes in pieces, too: not before a record shows what that brings.
PIECES = False
LONG_PRODUCT = "mlp/down"

# What XLA is told where wires are copied. It supposes that a copy takes long, as a message of chains does, so that it
# ends where it is needed.
_LONG, _APART = "xla_gpu_experimental_collective_perf_table_path", "xla_gpu_dot_merger_threshold_mb"
COPY_OPTIONS = {**peer_copy.COMPILER_OPTIONS, _LONG: rule.CHAIN_OPTIONS[_LONG]}
# With pieces the two products of one matrix stay two.
PIECE_OPTIONS = {**COPY_OPTIONS, _APART: rule.CHAIN_OPTIONS[_APART]}


def choose(plan: Mapping[str, Compression | None], config: TrainConfig, mesh: Mesh) -> dict[str, Compression | None]:
    """Returns the plan with a link for each direction of sites that leave both open, where copies pay."""
    if why_not_copied(config, mesh) is not None:
        return dict(plan)
    in_pieces = PIECES and _in_pieces(config)
    return {site: copies.with_copies(c, in_pieces and site.endswith(LONG_PRODUCT)) for site, c in plan.items()}


def _in_pieces(config: TrainConfig) -> bool:
    """Returns whether the sum of the mlp's product is copied in two pieces, the first beside the second's product."""
    rows, model = microbatch(config) * config.data.sequence_length, config.model
    y = jax.ShapeDtypeStruct((rows, model.d_model), jnp.dtype(config.compute_dtype))
    return matmul_psum.first_rows(y, inner=model.d_mlp // config.mesh.tp) is not None


def why_not_copied(config: TrainConfig, mesh: Mesh) -> str | None:
    """Returns why no sum is copied on this mesh unless it is asked for; None where sums are."""
    device = mesh.devices.flat[0]
    if (why := copies.why_other_mesh(config.mesh.tp, mesh.devices.size)) is not None:
        return why
    if device.platform != "gpu" or jax.process_count() > 1:
        return "copies are for GPUs that one process drives"
    dtype = jnp.dtype(config.compute_dtype)
    nbytes = microbatch(config) * config.data.sequence_length * config.model.d_model * dtype.itemsize
    cut, adapters = sequence_parallel(config)[0], config.lora.rank is not None
    if (why := copies.why_other_step(chains(config, device)[0], cut, adapters, nbytes)) is not None:
        return why
    return nvlink.why_device_unsupported(device) or hardware.missing(device.device_kind)


def describe(plan: Iterable[tuple[str, Compression | None]], config: TrainConfig, mesh: Mesh) -> str:
    """Returns which sums copy engines bring, and why."""
    sites = [c for _, c in plan if c is not None]
    both, backward = (any(getattr(c, key) == "copy" for c in sites) for key in ("link", "backward_link"))
    if config.compression.link == "copy" or config.compression.backward_link == "copy":
        which = "sums" if both else "gradients' sums"
        return f"copied: {which} (as configured)"
    if backward:
        more = ", and the mlp's beside their own product" if both else ""
        return f"copied: gradients' sums, beside the products of their weights{more}"
    return f"copied: no sums ({why_not_copied(config, mesh) or 'as configured'})"


def compiler_options(
    plan: Iterable[tuple[str, Compression | None]], count: int, platform: str, gradients: bool = False
) -> dict[str, int | str] | None:
    """Returns XLA's options for layers in so many chains, and for copies where the plan has some; None for none.

    gradients: layers' gradients travel beside the backward pass (`taco_jax.compression.chains.compiler_options`).
    """
    options = rule.compiler_options(count, platform, gradients) or {}
    compressions = [c for _, c in plan if c is not None]
    if platform != "cpu" and any(c.link == "copy" for c in compressions):
        options |= rule.unless_in_flags(PIECE_OPTIONS)
    elif platform != "cpu" and any(c.backward_link == "copy" for c in compressions):
        options |= rule.unless_in_flags(COPY_OPTIONS)
    return options or None
