"""Tiles handed out as workers come for them.

Multiprocessors get unequal shares of the memory's bandwidth: of tiles dealt out beforehand the last ones wait 5 to 9 %
of the time for the slowest multiprocessor. Here workers draw numbers from a counter in global memory instead. A number
takes the memory's latency, and all threads of a warpgroup need it: so it is drawn when a tile's work begins, put into
shared memory behind the barrier that is there anyway, and used a tile later.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_SCALAR = plgpu.Layout.WG_SPLAT


class Tickets:
    """The numbers of one warpgroup.

    counter_g: int32[1] in global memory, zero when the kernel starts. numbers_s: the warpgroup's own int32[2].
    """

    def __init__(self, counter_g, numbers_s):
        self.counter_g, self.numbers_s = counter_g, numbers_s

    @staticmethod
    def scratch(warpgroups: int):
        return plgpu.SMEM((warpgroups, 2), jnp.int32)

    def draw(self):
        """The next number, in the leading thread alone, which does not wait for it yet; in others it means nothing."""
        result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR(()))

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
        def add(ctx, counter):
            i32 = ir.IntegerType.get_signless(32)
            operands = [mgpu.utils.memref_ptr(counter), _leads()]
            text = "{ mov.u32 $0, 0; @$2 atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }"
            number = llvm.inline_asm(i32, operands, text, "=&r,l,b", has_side_effects=True)
            return mgpu.FragmentedArray.splat(number, (), is_signed=True)

        return add(self.counter_g)

    def put(self, k, number) -> None:
        """Number k (-1, 0, ...) where all threads find it behind their next barrier, before `get` of number k + 2."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR(())))
        def store(ctx, numbers, array):
            address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(numbers))
            operands = [address, array.registers.item(), _leads()]
            text = "@$2 st.shared.u32 [$0], $1;"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,b", has_side_effects=True)

        store(self.numbers_s.at[lax.rem(k + 2, jnp.int32(2))], number)

    def get(self, k):
        """Number k, in all threads, after a barrier behind `put`."""
        return self.numbers_s[lax.rem(k + 2, jnp.int32(2))]


def barrier() -> None:
    """All threads of a warpgroup wait for each other."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        mgpu.utils.warpgroup_barrier()

    wait()


def _leads() -> ir.Value:
    return mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
