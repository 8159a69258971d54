"""The Hadamard transform of 128 in registers, by additions: H128 is seven H2, one for each bit of a column.

Five of a column's bits say which of a thread's registers it is in, two which of four neighbouring threads: these take
an exchange of registers between threads. A product of matrices, as the codec's other kernels have it, needs another
accumulator, for which ptxas finds no registers in a warpgroup that multiplies much larger ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS

COLUMNS = 128


def transform(x: jax.Array) -> jax.Array:
    """float32[64, 128] in the layout of a product -> H128 x, without the factor 1 / sqrt(128), row by row."""
    result = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def add(ctx, array):
        registers = array.registers.reshape(-1, 2)  # [eight columns each, row r or r + 8], two columns each
        out = np.empty_like(registers)
        signs = [_sign(distance) for distance in (1, 2)]
        for half in range(2):
            out[:, half] = _row(list(registers[:, half]), signs)
        out = out.reshape(array.registers.shape)
        return mgpu.FragmentedArray(_registers=out, _layout=array.layout, _is_signed=None)

    return add(x)


def _row(pairs: list, signs: list) -> list:
    """A thread's columns of one row."""
    distance = 1
    while distance < len(pairs):
        for i in range(len(pairs)):
            if not i & distance:
                a, b = pairs[i], pairs[i + distance]
                pairs[i], pairs[i + distance] = arith.addf(a, b), arith.subf(a, b)
        distance *= 2
    out = []
    for pair in pairs:
        a, b = (vector.extract(pair, [], [i]) for i in range(2))
        two = [arith.addf(a, b), arith.subf(a, b)]
        for lane, sign in zip((1, 2), signs):
            # a + b where the thread's bit is 0, else the other's a minus its own b.
            others = [mgpu.utils.shfl_bfly(value, lane) for value in two]
            two = [arith.addf(arith.mulf(value, sign), other) for value, other in zip(two, others)]
        out.append(vector.from_elements(pair.type, two))
    return out


def _sign(distance: int) -> ir.Value:
    """1 where the thread's bit of this value is 0, else -1."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    constant = lambda value: arith.constant(i32, value)
    bit = arith.andi(mgpu.utils.thread_idx(), constant(distance))
    one, minus = (arith.constant(f32, ir.FloatAttr.get(f32, value)) for value in (1.0, -1.0))
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, bit, constant(0)), one, minus)
