"""The constants that a Triton kernel compiles in: the number format, how a block is cut for it, and tuning. Needs no
triton.

A program works on tiles of `rows` blocks of one message. It holds a block as `parts` tensors of `columns` elements
each, [rows, columns], because what crosses parts is then arithmetic between tensors, without any shuffle:

* H of a block is H of each part and a butterfly between parts, which also halves the matrix products,
* codes of fewer than 8 bits are packed from halves, quarters or eighths of a block.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from pallas_kernels.formats import SCALE_BYTES, TINY, Format, packing_parts

# Elements of one part that go through a matrix product with H: tensor cores take 16 and more.
MIN_COLUMNS = 16


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut up; none of it changes a byte."""

    rows: int  # blocks of a tile
    columns: int  # of a part at most, where blocks are rotated
    warps: int
    stages: int  # tiles whose loads are in flight; 1: none ahead
    programs: int  # programs of a multiprocessor


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Hashable, plain Python values only: kernels read its fields while they compile.

    ranks: 0 where messages stand by themselves, else how many wires a kernel sums up. own: the owner's term of the sum
    is not on a wire but a chunk of x. casts, casts_back: 8-bit floats are made and read by the hardware's conversions,
    else by integer arithmetic.
    """

    bits: int
    is_float: bool
    mantissa: int
    min_exponent: int
    maximum: float
    top: int  # code of the maximum
    nan: int
    block: int
    rotated: bool
    signed: bool
    scale_bytes: int
    is_site: bool
    is_e8m0: bool
    is_ue5m3: bool
    e8m0_bias: int
    reciprocal_maximum: float
    stochastic: bool
    # Values may lie beyond the maximum by more than the rounding error that rounding to nearest takes back.
    clips: bool
    rows: int
    max_columns: int
    stages: int
    align: int
    store_bytes: int  # that a thread writes at once: as many as it reads elements of x at once
    casts: bool
    casts_back: bool
    ranks: int = 0
    own: bool = False
    residual: bool = False

    @property
    def pieces(self) -> int:
        """Parts of a block that share bytes."""
        return packing_parts(self.bits)

    @property
    def planes(self) -> int:
        """Runs of bytes that one set of pieces makes."""
        return self.pieces * self.bits // 8

    @property
    def parts(self) -> int:
        """Tensors that hold a block's values."""
        if not self.rotated:
            return self.pieces
        return max(min(self.pieces, self.block // MIN_COLUMNS), self.block // self.max_columns)

    @property
    def columns(self) -> int:
        return self.block // self.parts

    @property
    def code_parts(self) -> int:
        """Tensors that hold a block's codes: more than `parts` where pieces are too short for a matrix product."""
        return max(self.parts, self.pieces)

    @property
    def code_columns(self) -> int:
        return self.block // self.code_parts

    @property
    def slices(self) -> int:
        """Tensors of codes that make one piece."""
        return self.code_parts // self.pieces

    @property
    def part_levels(self) -> int:
        return self.parts.bit_length() - 1

    @property
    def halvings(self) -> int:
        """Returns how often a tensor of values is halved to become tensors of codes."""
        return (self.code_parts // self.parts).bit_length() - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one block's codes."""
        return self.block * self.bits // 8

    @property
    def plane_columns(self) -> int:
        """Bytes of a block in one plane."""
        return self.block // self.pieces

    @property
    def code_mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def magnitude_mask(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def rotation_scale(self) -> float:
        return float(np.float32(1.0 / math.sqrt(self.block)))

    @property
    def tiny(self) -> float:
        return float(TINY)


def recipe(fmt: Format, tuning: Tuning, dtype: str, capability: tuple[int, int], *, align: int, **options) -> Recipe:
    """The recipe of a format for x of `dtype` on a device of this compute capability.

    `align` is what divides every offset and length of x, `options` are the fields that have a default.
    """
    # OCP's int8 element is k / 64, so its shared exponent carries the 2^6 (and then ends below the largest floats).
    e8m0_bias = 6 if fmt.scale == "e8m0" and fmt.element == "int8" else 0
    return Recipe(
        bits=fmt.bits,
        is_float=fmt.is_float,
        mantissa=fmt.mantissa or 0,
        min_exponent=fmt.min_exponent,
        maximum=float(fmt.maximum),
        top=_code_of_maximum(fmt),
        nan=-1 if fmt.nan is None else fmt.nan,
        block=fmt.block,
        rotated=fmt.rotation != "none",
        signed=fmt.rotation == "signed_hadamard",
        scale_bytes=SCALE_BYTES[fmt.scale],
        is_site=fmt.scale == "site",
        is_e8m0=fmt.scale == "e8m0",
        is_ue5m3=fmt.scale == "ue5m3",
        e8m0_bias=e8m0_bias,
        reciprocal_maximum=float(fmt.reciprocal_maximum),
        stochastic=fmt.rounding == "stochastic",
        clips=fmt.rounding == "stochastic" or fmt.scale in ("ue5m3", "site") or e8m0_bias > 0,
        rows=tuning.rows,
        max_columns=tuning.columns,
        stages=tuning.stages,
        align=align,
        store_bytes=4 if dtype == "float32" else 8,
        # From float32 there is a conversion since 8.9, but Triton takes the way over float16 there, and rounds twice.
        casts=capability >= (9, 0),
        casts_back=capability >= (8, 9),
        **options,
    )


def tuning(fmt: Format, operation: str, dtype: str, capability: tuple[int, int]) -> Tuning:
    """Tile sizes by the number of registers that a block takes: about 64 elements for each thread, or 32.

    Programs are as many as are resident at once, by the registers that they take, or several rounds of as many. For
    rotated blocks of 128 on Hopper: the fastest of some 60 on an H200. On other GPUs nothing was measured; registers
    and memory there are those that the compilers report (`experiments/kernel_targets.py`).
    """
    major = capability[0]
    if fmt.rotation == "none":
        if operation != "reduce":
            return Tuning(8192 // fmt.block, fmt.block, warps=4, stages=2, programs=32)
        if major == 9:
            return Tuning(8192 // fmt.block, fmt.block, warps=4, stages=2, programs=3)
        # Half as many elements for each thread as on Hopper: else registers are used up, or spilled. Three to five are
        # resident, by codec and GPU.
        return Tuning(4096 // fmt.block, fmt.block, warps=4, stages=2, programs=12)
    if major == 9 and fmt.block == 128 and dtype != "float32":
        rows, warps, programs = {"encode": (128, 8, 2), "decode": (32, 4, 16), "reduce": (32, 4, 4)}[operation]
        return Tuning(rows, 64, warps, stages=3, programs=programs)
    if major >= 10:
        # Products of 64 rows and four warps would take the matrix instruction of data-center Blackwell, whose tensor
        # memory lets a multiprocessor hold one program or two. With fewer it is the one that all GPUs have.
        # Codes that straddle bytes are in four parts or eight, which spill or take most registers with as many warps.
        warps = max(2, fmt.block // (64 if packing_parts(fmt.bits) > 2 else 32))
        # Two to five are resident by codec and GPU: whole rounds of them, or one round that ends early among many.
        rows, programs = max(32, 2048 // fmt.block), (80 if operation == "decode" else 48) // warps
        if dtype == "float32":
            return Tuning(rows, 16, warps, stages=2, programs=programs)
        return Tuning(rows, min(64, fmt.block), warps, stages=3, programs=programs)
    warps = 8 if fmt.block == 256 else 4
    programs = (2 if operation == "reduce" else 3) * 4 // warps
    # Hopper's products read H from shared memory; before, every warp keeps it in registers, so it had better be small.
    # A reduction of float32, three products in a row, has no registers to spare anywhere.
    columns = 16 if operation == "reduce" and dtype == "float32" else 64 if major == 9 else 32
    return Tuning(max(8192 // fmt.block, 64), columns, warps, stages=2, programs=programs)


def alignment(*lengths: int) -> int:
    """The largest power of two, at most 16, that divides all of them."""
    return math.gcd(16, *lengths)


def _code_of_maximum(fmt: Format) -> int:
    if not fmt.is_float:
        return int(fmt.maximum)
    exponent = math.floor(math.log2(fmt.maximum))
    significand = int(fmt.maximum / 2.0 ** (exponent - fmt.mantissa))
    return ((exponent - fmt.min_exponent) << fmt.mantissa) + significand
