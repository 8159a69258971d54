"""The kernels: persistent programs, each of which takes every so many tiles of all messages.

    encode       x (or the sum of wires and the owner's chunk of x) -> wires, and the largest block maximum;
                 with the residual, what the wires lost of x as well
    decode       wires (or their sum, ...) -> x

`maxima` is encode's first pass where a message has one scale and no exponent is known for it yet. The same functions
run in Triton's interpreter.
"""

import triton
import triton.language as tl

from pallas_kernels.triton import memory, scales
from pallas_kernels.triton.elements import from_codes, to_codes, uniform
from pallas_kernels.triton.packing import halve, join, pack, unpack
from pallas_kernels.triton.recipe import Recipe
from pallas_kernels.triton.rotation import hadamard, rotate, unrotate

_UNCALIBRATED = tl.constexpr(-(2**31))


class Constants:
    """A `Recipe` whose fields are compile-time constants to Triton's compiler (its interpreter takes plain values)."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return tl.constexpr(getattr(self.recipe, name))

    def __eq__(self, other) -> bool:
        return isinstance(other, Constants) and self.recipe == other.recipe

    def __hash__(self) -> int:
        return hash(self.recipe)

    def __repr__(self) -> str:
        return repr(self.recipe)


@triton.jit
def encode_kernel(
    x_ptr, wires_ptr, rank_ptr, exponent_ptr, seed_ptr, message_maxima_ptr,
    elements_, per_message_, offset_, distance_, messages_,
    out_ptr, largest_ptr, R: tl.constexpr,
):  # fmt: skip
    _encode(
        x_ptr, wires_ptr, rank_ptr, exponent_ptr, seed_ptr, message_maxima_ptr=message_maxima_ptr, elements_=elements_,
        per_message_=per_message_, offset_=offset_, distance_=distance_, messages_=messages_, out_ptr=out_ptr,
        largest_ptr=largest_ptr, error_ptr=x_ptr, R=R,
    )  # fmt: skip


@triton.jit
def encode_with_residual_kernel(
    x_ptr, wires_ptr, rank_ptr, exponent_ptr, seed_ptr, message_maxima_ptr,
    elements_, per_message_, offset_, distance_, messages_,
    out_ptr, largest_ptr, error_ptr, R: tl.constexpr,
):  # fmt: skip
    """Also x less what the wires say of it, message after message."""
    _encode(
        x_ptr, wires_ptr, rank_ptr, exponent_ptr, seed_ptr, message_maxima_ptr=message_maxima_ptr, elements_=elements_,
        per_message_=per_message_, offset_=offset_, distance_=distance_, messages_=messages_, out_ptr=out_ptr,
        largest_ptr=largest_ptr, error_ptr=error_ptr, R=R,
    )  # fmt: skip


@triton.jit
def _encode(
    x_ptr, wires_ptr, rank_ptr, exponent_ptr, seed_ptr, message_maxima_ptr,
    elements_, per_message_, offset_, distance_, messages_,
    out_ptr, largest_ptr, error_ptr, R: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = R.rows
    per_message, blocks, tiles = _counts(per_message_, R)
    messages = 0 - messages_
    rank = tl.load(rank_ptr)
    exponent = tl.load(exponent_ptr)
    length = memory.message_bytes(blocks, R)
    h = hadamard(x_ptr.dtype.element_ty, R)
    h_values = hadamard(tl.float16, R) if R.residual else h
    largest = tl.zeros((ROWS,), tl.int32)
    for tile in tl.range(tl.program_id(0), messages * tiles, tl.num_programs(0), num_stages=R.stages):
        message = tile // tiles
        first = (tile - message * tiles) * R.rows
        zs = _rotated(
            x_ptr, wires_ptr, rank, exponent, message, first, elements_, per_message, blocks, offset_, distance_, h, R
        )
        maxima = scales.block_maxima(zs, R)
        largest = tl.maximum(largest, maxima)
        message_maximum = tl.load(message_maxima_ptr + message) if R.is_site else 0
        multiplier, planes = scales.compute(maxima, exponent, message_maximum, R)
        codes = _codes(zs, maxima, multiplier, first, message, seed_ptr, R)
        out = out_ptr + message.to(tl.int64) * length
        memory.store_bytes(out, first, blocks, pack(codes, R), R)
        memory.store_scales(out, first, blocks, planes, R)
        if R.residual:
            _store_residual(
                x_ptr, error_ptr, message, first, elements_, per_message=per_message, offset_=offset_,
                distance_=distance_, codes=codes, planes=planes, exponent=exponent, message_maximum=message_maximum,
                h=h_values, R=R,
            )  # fmt: skip
    for message in tl.range(tl.program_id(0), messages, tl.num_programs(0)):
        code = scales.site_code(exponent, tl.load(message_maxima_ptr + message), R) if R.is_site else 0
        memory.store_rest(out_ptr + tl.cast(message, tl.int64) * length, blocks, code, R)
    tl.store(largest_ptr + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit
def maxima_kernel(
    x_ptr, wires_ptr, rank_ptr, exponent_ptr,
    elements_, per_message_, offset_, distance_,
    maxima_ptr, R: tl.constexpr,
):  # fmt: skip
    """Bits of the largest finite block maximum of what each program saw of message program_id(1).

    With a known exponent nobody asks for them: then it reads nothing.
    """
    ROWS: tl.constexpr = R.rows
    per_message, blocks, tiles = _counts(per_message_, R)
    message = tl.program_id(1)
    rank = tl.load(rank_ptr)
    exponent = tl.load(exponent_ptr)
    h = hadamard(x_ptr.dtype.element_ty, R)
    largest = tl.zeros((ROWS,), tl.int32)
    for tile in tl.range(tl.program_id(0), tl.where(exponent == _UNCALIBRATED, tiles, 0), tl.num_programs(0)):
        first = tile * R.rows
        zs = _rotated(
            x_ptr, wires_ptr, rank, exponent, message, first, elements_, per_message, blocks, offset_, distance_, h, R
        )
        maxima = scales.block_maxima(zs, R)
        largest = tl.maximum(largest, tl.where(maxima < scales.INFINITY, maxima, 0))
    tl.store(maxima_ptr + message * tl.num_programs(0) + tl.program_id(0), tl.max(largest, axis=0))


@triton.jit
def decode_kernel(
    x_ptr, wires_ptr, rank_ptr, exponent_ptr,
    elements_, per_message_, offset_, distance_, messages_,
    y_ptr, R: tl.constexpr,
):  # fmt: skip
    """P wires -> P pieces of y; or their sum, with or without an own term, -> y."""
    per_message, blocks, tiles = _counts(per_message_, R)
    messages = 0 - messages_
    rank = tl.load(rank_ptr)
    exponent = tl.load(exponent_ptr)
    length = memory.message_bytes(blocks, R)
    # One wire's values are float16, a sum of them float32.
    h = hadamard(tl.float16 if R.ranks == 0 else tl.float32, R)
    h_own = hadamard(x_ptr.dtype.element_ty, R) if R.own else h
    for tile in tl.range(tl.program_id(0), messages * tiles, tl.num_programs(0), num_stages=R.stages):
        message = tile // tiles
        first = (tile - message * tiles) * R.rows
        begin = first.to(tl.int64) * R.block
        if R.ranks == 0:
            wire = wires_ptr + message.to(tl.int64) * length
            # Tensor cores take values as float16, which all formats are within.
            values = _values(wire, first, blocks, not R.rotated, R)
            scale = _scale(wire, exponent, first, blocks, R)
            ys = unrotate(values, scale, h, R)
            start = message.to(tl.int64) * _length(distance_) - offset_
            available = tl.minimum(per_message, _length(elements_) - start) - begin
            memory.store_values(y_ptr + tl.multiple_of(start + begin, R.align), available, ys, R)
        else:
            zs = _rotated(
                x_ptr, wires_ptr, rank, exponent, message, first, elements_, per_message, blocks, offset_, distance_,
                h_own, R,
            )  # fmt: skip
            memory.store_values(y_ptr + begin, per_message - begin, unrotate(zs, None, h, R), R)


@triton.jit
def _store_residual(
    x_ptr, error_ptr, message, first, elements_, per_message, offset_, distance_, codes, planes, exponent,
    message_maximum, h, R: tl.constexpr,
):  # fmt: skip
    """Stores a tile of x less the values of its codes and scale bytes, which are as `decode_kernel` makes them."""
    ROWS: tl.constexpr = R.rows
    if R.is_site:
        planes = (scales.site_code(exponent, message_maximum, R),)
    scale = tl.broadcast_to(scales.read(planes, exponent, R), (ROWS,))
    ys = unrotate(_from_codes(codes, not R.rotated, R), scale, h, R)
    # Read once more: that it is in a cache costs less than registers that keep it.
    xs = _chunk(x_ptr, message, first, elements_, per_message, offset_=offset_, distance_=distance_, R=R)
    errors = ()
    for i in tl.static_range(R.parts):
        y = ys[i].to(x_ptr.dtype.element_ty).to(tl.float32)
        errors = errors + (xs[i].to(tl.float32) - y,)
    begin = first.to(tl.int64) * R.block
    start = message.to(tl.int64) * per_message
    # The residual of a whole geometry ends with x.
    whole = (offset_ == 0) & (_length(distance_) == per_message)
    available = tl.minimum(per_message, tl.where(whole, _length(elements_) - start, per_message)) - begin
    memory.store_values(error_ptr + tl.multiple_of(start + begin, R.align), available, errors, R)


@triton.jit
def _length(negated):
    """A length that came negated, as int64: -2^31 is an int32, and 2^31 is not."""
    return tl.cast(0, tl.int64) - negated


@triton.jit
def _counts(per_message_, R: tl.constexpr):
    """(elements int64, blocks int32, tiles int32) of a message."""
    per_message = _length(per_message_)
    blocks = ((per_message + (R.block - 1)) // R.block).to(tl.int32)
    return per_message, blocks, (blocks + (R.rows - 1)) // R.rows


@triton.jit
def _rotated(
    x_ptr, wires_ptr, rank, exponent, message, first, elements_, per_message, blocks, offset_, distance_, h,
    R: tl.constexpr,
):  # fmt: skip
    """A tile in the rotated domain: of message `message` of x, or of the sum over ranks."""
    if R.ranks == 0:
        return rotate(_chunk(x_ptr, message, first, elements_, per_message, offset_, distance_, R), h, R)
    elif R.own:
        # The values are asked for early and rotated when it is their turn, which is what keeps registers free.
        xs = _chunk(x_ptr, rank, first, elements_, per_message, offset_, distance_, R)
        totals = _with_wires(_nothing(R), 0, rank, wires_ptr, exponent, first, blocks, R)
        own = rotate(xs, h, R)
        sums = ()
        for i in tl.static_range(R.parts):
            sums = sums + (totals[i] + own[i],)
        return _with_wires(sums, rank + 1, R.ranks, wires_ptr, exponent, first, blocks, R)
    else:
        return _with_wires(_nothing(R), 0, R.ranks, wires_ptr, exponent, first, blocks, R)


@triton.jit
def _nothing(R: tl.constexpr):
    """Returns the value to which adding changes nothing, the sign of a zero included: -0."""
    ROWS: tl.constexpr = R.rows
    COLUMNS: tl.constexpr = R.columns
    out = ()
    for _ in tl.static_range(R.parts):
        out = out + (tl.full((ROWS, COLUMNS), -0.0, tl.float32),)
    return out


@triton.jit
def _with_wires(totals, begin, end, wires_ptr, exponent, first, blocks, R: tl.constexpr):
    """totals + what the wires of ranks begin to end - 1 say, one after the other."""
    for p in tl.range(begin, end, num_stages=R.stages):
        wire = wires_ptr + tl.cast(p, tl.int64) * memory.message_bytes(blocks, R)
        terms = _values(wire, first, blocks, True, R)
        scale = _scale(wire, exponent, first, blocks, R)
        sums = ()
        for i in tl.static_range(R.parts):
            sums = sums + (totals[i] + terms[i] * scale[:, None],)
        totals = sums
    return totals


@triton.jit
def _chunk(x_ptr, message, first, elements_, per_message, offset_, distance_, R: tl.constexpr):
    """A tile of message `message` of x, as it lies in memory."""
    begin = first.to(tl.int64) * R.block
    start = message.to(tl.int64) * _length(distance_) - offset_
    available = tl.minimum(per_message, _length(elements_) - start) - begin
    x_ptr += tl.multiple_of(start + begin, R.align)
    return memory.load_values(x_ptr, available, R)


@triton.jit
def _scale(wire_ptr, exponent, first, blocks, R: tl.constexpr):
    ROWS: tl.constexpr = R.rows
    planes = memory.load_scales(wire_ptr, first, blocks, R)
    return tl.broadcast_to(scales.read(planes, exponent, R), (ROWS,))


@triton.jit
def _values(wire_ptr, first, blocks, WIDE: tl.constexpr, R: tl.constexpr):
    """The values that a tile's codes stand for, float32 or float16, as `parts` tensors."""
    return _from_codes(unpack(memory.load_bytes(wire_ptr, first, blocks, R), R), WIDE, R)


@triton.jit
def _from_codes(codes, WIDE: tl.constexpr, R: tl.constexpr):
    values = ()
    for i in tl.static_range(R.code_parts):
        values = values + (from_codes(codes[i], WIDE, R),)
    return join(values, R.parts, R.halvings)


@triton.jit
def _codes(zs, maxima, multiplier, first, message, seed_ptr, R: tl.constexpr):
    finite = (maxima < scales.INFINITY)[:, None]
    codes = ()
    for i in tl.static_range(R.parts):
        noise = None
        if R.stochastic:
            element = (first + tl.arange(0, R.rows))[:, None].to(tl.uint32) * R.block
            element += (tl.arange(0, R.columns)[None, :] + i * R.columns).to(tl.uint32)
            # The sum of a reduction is one message; its chunk's number is in no message.
            noise = uniform(element, message, tl.load(seed_ptr), tl.load(seed_ptr + 1))
        # A block with an Inf or NaN is marked by its scale (or its codes); zeros keep its codes defined.
        code = to_codes(tl.where(finite, zs[i] * multiplier[:, None], 0.0), noise, R)
        if R.is_site:
            code = tl.where(finite, code, R.nan)
        codes = codes + (code,)
    return halve(codes, R.parts, R.halvings)
