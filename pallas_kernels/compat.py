"""What differs between jax 0.10.2 and 0.12 in Mosaic GPU, asked of the library and not of its version."""

from __future__ import annotations

import inspect

from jax.experimental.pallas import mosaic_gpu as plgpu

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


def compiler_params() -> plgpu.CompilerParams:
    """Lane semantics: register layouts are what the kernel says, not what a compiler pass infers."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


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
