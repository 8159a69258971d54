"""Hides what differs between jax 0.10.2 and 0.12 in Mosaic GPU, asked of the library where it can be asked."""

from __future__ import annotations

import inspect

import jax
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

# Before jax 0.11 a kernel may not change an operand: a call that can be batched knows nothing of refs.
KERNELS_TAKE_REFS = jax.__version_info__ >= (0, 11)
# Nor does a warp by itself know its device's place in the mesh.
WARPS_KNOW_THE_MESH = jax.__version_info__ >= (0, 11)

_LOAD_NEEDS_INDEX = inspect.signature(plgpu.load).parameters.get("idx", None) is not None and (
    inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty
)


def load(ref, layout, *, optimized: bool = True):
    """Registers of a whole ref in `layout`; optimized=False allows bank conflicts and global memory."""
    if _LOAD_NEEDS_INDEX:
        return plgpu.load(ref, (), layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)


def store(ref, value, *, optimized: bool = True) -> None:
    """ref[...] = value; optimized=False allows bank conflicts and narrow writes, which jax refuses from 0.12 on."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=optimized)
    else:
        ref[...] = value


def store_tile(ref, value, transforms, interpret: bool) -> None:
    """ref[...] = value in the layout of a product, to shared memory with these transforms.

    Before jax 0.12 an assignment reads what was there as well, by instructions that no compiler takes out.
    """
    if interpret or hasattr(plgpu, "store"):
        ref[...] = value
        return
    swizzle = next(t.swizzle for t in transforms if isinstance(t, plgpu.SwizzleTransform))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tuple(transforms)), plgpu.Layout.WGMMA))
    def write(ctx, memory, array):
        array.store_tiled(memory, swizzle=swizzle)

    write(ref, value)


def compiler_params() -> plgpu.CompilerParams:
    """Lane semantics: register layouts are what the kernel says, not what a compiler pass infers.

    Nor are there barriers before every copy and around every store, up to 24 for a tile of a sum: the kernels have the
    few that are needed (`pipeline.py`).
    """
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def interpret_params(detect_races: bool = False):
    """For `interpret=`: emulates a GPU's memories and barriers on a CPU. Public from jax 0.11."""
    try:
        params = plgpu.InterpretGPUParams
    except AttributeError:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params(detect_races=detect_races)


def reset_interpreter() -> None:
    """After an exception inside an interpreted kernel its state has to be cleared."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def _lower_concatenation() -> None:
    """Gives jax 0.10 the rule by which later versions concatenate: the registers of one array after another's."""
    from jax._src.pallas.mosaic_gpu import lowering
    from jax.experimental.mosaic import gpu as mgpu

    @lowering.register_lowering_rule(lax.concatenate_p, mgpu.LoweringSemantics.Lane)
    def concatenate(ctx, *args, dimension):
        arrays = [lowering._ensure_fa(x, aval.dtype) for x, aval in zip(args, ctx.avals_in)]
        first = arrays[0]
        if not isinstance(first.layout, mgpu.TiledLayout) or any(a.layout != first.layout for a in arrays):
            raise NotImplementedError(f"concatenation of register layouts {[a.layout for a in arrays]}")
        registers = np.concatenate([a.registers for a in arrays], axis=dimension)
        return mgpu.FragmentedArray(_registers=registers, _layout=first.layout, _is_signed=first.is_signed)


if jax.__version_info__ < (0, 11):
    _lower_concatenation()
