"""The Hadamard transform of 128 columns, twice: by additions in registers, and by products on the tensor cores.

| function | used by |
|---|---|
| `hadamard_butterfly` | warpgroups that multiply: ptxas finds no registers for the accumulator of another product |
| `hadamard_wgmma` | the warpgroup that sums, which has no such accumulator |

Both leave out the factor 1 / sqrt(128).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.formats import hadamard_signs
from pallas_kernels.matmul_all_reduce.plan import FRAME_ROWS
from pallas_kernels.matmul_all_reduce.support import TILE_N
from pallas_kernels.mosaic.rotation import transforms

HALF_COLUMNS = TILE_N // 2


def matrix_operand() -> jax.Array:
    """Returns the matrix of `hadamard_wgmma` as a kernel's input, bfloat16[64, 64]."""
    return jnp.asarray(hadamard_signs(HALF_COLUMNS), jnp.bfloat16)


def matrix_scratch():
    """Returns the type of shared memory for the matrix."""
    shape = (HALF_COLUMNS, HALF_COLUMNS)
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms(jnp.bfloat16, HALF_COLUMNS))


def hadamard_wgmma(x: jax.Array, matrix_s) -> list[jax.Array]:
    """Transforms bfloat16[64, 128] in registers on the tensor cores; returns both halves, float32[64, 64] each.

        H128 [a, b] = [H64 a + H64 b, H64 a - H64 b]

    So the matrix is 8 KB of shared memory instead of 32. Products of +-1 with codes are exact, sums are float32.
    """

    def multiply(first, second):
        plgpu.wgmma(first, x[:, :HALF_COLUMNS], matrix_s)
        plgpu.wgmma(second, x[:, HALF_COLUMNS:], matrix_s)
        return first[...], second[...]

    accumulator = plgpu.ACC((FRAME_ROWS, HALF_COLUMNS), jnp.float32)
    a, b = pl.run_scoped(multiply, accumulator, accumulator)
    return [a + b, a - b]


def hadamard_butterfly(x: jax.Array) -> jax.Array:
    """Transforms float32[64, 128] in the layout of a product, row by row, by additions.

    H128 is seven H2, one for each bit of a column. Five of a column's bits say which of a thread's registers it is in.
    Two say which of four neighbouring threads: these take an exchange of registers between threads.
    """
    result = plgpu.ShapeDtypeStruct((FRAME_ROWS, TILE_N), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def transform(ctx, array):
        registers = array.registers.reshape(-1, 2)  # [eight columns each, row r or r + 8], two columns each
        out = np.empty_like(registers)
        signs = [_thread_sign(distance) for distance in (1, 2)]
        for row in range(2):
            out[:, row] = _transform_row(list(registers[:, row]), signs)
        out = out.reshape(array.registers.shape)
        return mgpu.FragmentedArray(_registers=out, _layout=array.layout, _is_signed=None)

    return transform(x)


def _transform_row(pairs: list, signs: list) -> list:
    """Transforms a thread's columns of one row."""
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


def _thread_sign(distance: int) -> ir.Value:
    """Returns 1 where the thread's bit of this value is 0, else -1."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    constant = lambda value: arith.constant(i32, value)
    bit = arith.andi(mgpu.utils.thread_idx(), constant(distance))
    one, minus = (arith.constant(f32, ir.FloatAttr.get(f32, value)) for value in (1.0, -1.0))
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, bit, constant(0)), one, minus)
