"""Starts a kernel through jax-triton, which is imported here, when a kernel is first called.

`set_launcher` puts another way of running kernels in its place, for instance Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence

import jax
from jax import lax

from pallas_kernels.dispatch import compute_capability, region_device
from pallas_kernels.triton.recipe import Recipe

# An H100's; a device that is only known by name does not say.
_MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel call: arrays, then sizes, then outputs are the kernel's arguments in order."""

    kernel: str  # a name in kernels.py
    arrays: Sequence[jax.Array]
    sizes: Sequence[int]
    outputs: Sequence[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    recipe: Recipe
    warps: int
    aliases: dict[int, int]


Launcher = Callable[[Launch], list[jax.Array]]
_launcher: Launcher | None = None


def set_launcher(launcher: Launcher | None) -> None:
    """Runs kernels with `launcher`; None: on the GPU, through jax-triton."""
    global _launcher
    _launcher = launcher


def launch(call: Launch) -> list[jax.Array]:
    """Runs the kernel. Its outputs are typed varying over every mesh axis that an input varies over.

    Raises ModuleNotFoundError, saying what to install, where jax-triton or triton is missing.
    """
    outputs = (_launcher or _launch_on_gpu)(call)
    axes = {axis for x in call.arrays for axis in _varying(x)}
    out = []
    for y in outputs:
        missing = tuple(sorted(axes - _varying(y)))
        out.append(lax.pcast(y, missing, to="varying") if missing else y)
    return out


def multiprocessors() -> int:
    here = region_device()
    return getattr(here, "core_count", None) or getattr(here, "num_cores", None) or _MULTIPROCESSORS


def capability() -> tuple[int, int]:
    """The device's compute capability; the least one that kernels are for where it is not known."""
    return compute_capability(region_device()) or (8, 0)


def _launch_on_gpu(call: Launch) -> list[jax.Array]:
    try:
        jax_triton = importlib.import_module("jax_triton")
        kernels = importlib.import_module("pallas_kernels.triton.kernels")
    except ImportError as error:
        raise ModuleNotFoundError(
            "triton kernels need jax-triton and a GPU build of jax below 0.12: pip install 'taco-jax[triton]' "
            f"({str(error).splitlines()[0]})"
        ) from error
    known = compute_capability(region_device())
    run = functools.partial(
        jax_triton.triton_call,
        kernel=getattr(kernels, call.kernel),
        out_shape=list(call.outputs),
        name=call.kernel,
        grid=call.grid,
        num_warps=call.warps,
        num_stages=call.recipe.stages,
        compute_capability=None if known is None else 10 * known[0] + known[1],
        # Products and sums round one by one, as they do in the jnp codec.
        enable_fp_fusion=False,
        input_output_aliases=call.aliases,
        R=kernels.Constants(call.recipe),
    )
    # jax-triton has no rule for vmap: one call after the other.
    one_by_one = jax.custom_batching.sequential_vmap(lambda *arrays: run(*arrays, *call.sizes))
    return list(one_by_one(*call.arrays))


def _varying(x) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
