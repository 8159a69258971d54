"""The facts of the number format and the message layout: static, hashable, and free of arrays.

The jnp codec (`taco_jax/codec`) and every kernel read them here. Bytes on the wire: codes, then scales, one section for
each byte plane of a scale; sections start at multiples of 128 bytes, a message is a multiple of 1,024 bytes.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

import numpy as np

SECTION_BYTES = 128
MESSAGE_BYTES = 1024
# The int32 exponent of a site that has seen no data yet.
UNCALIBRATED = -(2**31)
# s' = 2^a bitcast((c + 896) << 20) is a normal float32 for every byte c while |a| <= 111, and block scales span
# 2^-109..2^122.
MAX_EXPONENT = 111
# Block maxima are clamped here, so that scales and their reciprocals are normal float32.
TINY = np.float32(2.0**-100)


@dataclass(frozen=True)
class Element:
    """One element format, of `bits` bits. `nan` is the code of a non-finite value, None where the format has none."""

    name: str
    bits: int
    maximum: float
    mantissa: int | None = None  # stored mantissa bits of a float format; None: integer
    min_exponent: int = 0  # exponent of the smallest normal
    nan: int | None = None

    @property
    def is_float(self) -> bool:
        return self.mantissa is not None


ELEMENTS = {
    e.name: e
    for e in (
        Element("e4m3", 8, 448.0, 3, -6, nan=0x7F),
        Element("e5m2", 8, 57344.0, 2, -14, nan=0x7E),
        Element("int8", 8, 127.0, nan=0x80),
        Element("int6", 6, 31.0, nan=0x20),
        Element("int5", 5, 15.0, nan=0x10),
        Element("int4", 4, 7.0, nan=0x08),
        Element("int3", 3, 3.0, nan=0x04),
        Element("e3m2", 6, 28.0, 2, -2),
        Element("e2m3", 6, 7.5, 3, 0),
        Element("e3m1", 5, 24.0, 1, -2),
        Element("e2m2", 5, 7.0, 2, 0),
        Element("e1m3", 5, 3.75, 3, 1),
        Element("e2m1", 4, 6.0, 1, 0),
        Element("e1m2", 4, 3.5, 2, 1),
        Element("e1m1", 3, 3.0, 1, 1),
    )
}
KERNEL_ELEMENTS = ("e4m3", "e5m2", "int8", "int6", "int5", "int4", "e3m2", "e2m3", "e2m1")
# Bytes of a block's scale, of which each is a section; `site` has one byte for the whole message.
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "e8m0": 1, "ue5m3": 1, "site": 0, "paper": 8}
# Bits of a block's scale that travels packed, as codes do.
SCALE_BITS = {"e5m0": 5, "e4m0": 4}
SCALES = ("float32", "bfloat16", "e8m0", "e5m0", "e4m0", "ue5m3", "site", "paper")
KERNEL_SCALES = ("float32", "bfloat16", "e8m0", "ue5m3", "site")
ROTATIONS = ("none", "hadamard", "signed_hadamard")
ROUNDINGS = ("nearest", "stochastic")
DTYPES = ("bfloat16", "float16", "float32")
CODEC_BLOCKS = (8, 16, 32, 64, 128, 256, 512)
BLOCKS = (32, 64, 128, 256)  # that kernels have
TOKEN = "token"  # a block that is the last dim of an array; the codec has it, kernels do not


@dataclass(frozen=True)
class Format:
    """How one message is written as bytes; fields as those of `taco_jax.Codec`."""

    element: str
    block: int
    rotation: str
    scale: str
    rounding: str = "nearest"

    def __post_init__(self):
        for field, valid in (
            ("element", KERNEL_ELEMENTS), ("rotation", ROTATIONS), ("scale", KERNEL_SCALES),
            ("rounding", ROUNDINGS), ("block", CODEC_BLOCKS),
        ):  # fmt: skip
            value = getattr(self, field)
            if value not in valid or isinstance(value, float):
                raise ValueError(f"Format.{field}={value!r}: must be one of {', '.join(map(str, valid))}")

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return ELEMENTS[self.element].bits

    @property
    def maximum(self) -> float:
        return ELEMENTS[self.element].maximum

    @property
    def mantissa(self) -> int | None:
        return ELEMENTS[self.element].mantissa

    @property
    def min_exponent(self) -> int:
        return ELEMENTS[self.element].min_exponent

    @property
    def nan(self) -> int | None:
        return ELEMENTS[self.element].nan

    @property
    def is_float(self) -> bool:
        return self.mantissa is not None

    @property
    def scale_bias(self) -> int:
        """Returns what an e8m0 byte carries beyond the scale: OCP's MXINT8 element is k / 64."""
        return ocp_bias(self.element) if self.scale == "e8m0" else 0

    @property
    def reciprocal_maximum(self) -> np.float32:
        return reciprocal_down(self.maximum)

    def n_blocks(self, n: int) -> int:
        return -(-n // self.block)

    def sections(self, n: int) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the codes and of each scale plane in a message of n elements."""
        lengths = self._section_lengths(n)
        return list(zip(section_offsets(lengths)[0], lengths))

    def wire_bytes(self, n: int) -> int:
        """Bytes of a message of n elements."""
        return section_offsets(self._section_lengths(n))[1] if n else 0

    def _section_lengths(self, n: int) -> list[int]:
        blocks = self.n_blocks(n)
        return [blocks * self.block * self.bits // 8, *scale_section_lengths(self.scale, blocks)]


@dataclass(frozen=True)
class Geometry:
    """How a flattened array x is cut into messages: message p holds x[o : min(o + n, S)] with o = offset + p stride.

    Beyond x there are zeros. By default messages lie side by side and cover x; with an offset and a stride they are the
    same piece of every rank's share, so that a collective can go in chunks without copying x.
    """

    elements: int  # S
    messages: int  # P
    per_message: int  # n
    offset: int = 0  # where message 0 starts; offset + n stays within the stride
    stride: int | None = None  # from one message's start to the next; None: n

    def __post_init__(self):
        for field in ("elements", "messages", "per_message", "offset", "stride"):
            value = getattr(self, field)
            if value is not None or field != "stride":
                object.__setattr__(self, field, _integer(f"Geometry.{field}", value))
        if min(self.elements, self.messages, self.per_message) < 1:
            raise ValueError(f"{self} must have at least one element, message and element of a message")
        if self.offset < 0 or self.offset + self.per_message > self.distance:
            raise ValueError(f"{self}: offset + per_message must stay within the stride")
        if self.messages * self.distance < self.elements:
            raise ValueError(f"{self}: the messages hold fewer elements than the array has")

    @property
    def distance(self) -> int:
        """From one message's start to the next."""
        return self.per_message if self.stride is None else self.stride

    @property
    def is_whole(self) -> bool:
        """Messages lie side by side from the start of x; else they are a chunk of them."""
        return self.offset == 0 and self.stride in (None, self.per_message)


def why_no_kernels(backend: str, fmt: Format, dtype: str) -> str | None:
    """Returns why no kernel of a package has this element, scale, block or dtype; None where there may be one."""
    if fmt.element not in KERNEL_ELEMENTS or fmt.scale not in KERNEL_SCALES:
        return f"{backend} has no element {fmt.element!r} with scale {fmt.scale!r}"
    if str(dtype) not in DTYPES:
        return f"{backend} kernels take {', '.join(DTYPES)}, not {dtype}"
    if fmt.block not in BLOCKS:
        return f"{backend} kernels have blocks of {', '.join(map(str, BLOCKS))}, not {fmt.block}"
    return None


def check_operands(fmt: Format, geometry: Geometry, x=None, wires=None, *, rank=0, dtype=None) -> None:
    """Raises ValueError or TypeError where an operand is not what kernels take it for: they read and write beyond its
    end, or take its bytes for something else. A rank that is traced is not known here."""
    if fmt.block not in BLOCKS:
        raise ValueError(f"block={fmt.block}: kernels have blocks of {', '.join(map(str, BLOCKS))}")
    if x is not None and x.size != geometry.elements:
        raise ValueError(f"x has {x.size} elements, and {geometry} says {geometry.elements}")
    for name, given in (("x", None if x is None else x.dtype), ("dtype", dtype)):
        if given is not None and _dtype_name(given) not in DTYPES:
            raise TypeError(f"{name} is {_dtype_name(given)}: kernels take {', '.join(DTYPES)}")
    shape = geometry.messages, fmt.wire_bytes(geometry.per_message)
    if wires is not None and tuple(wires.shape) != shape:
        raise ValueError(f"wires have shape {tuple(wires.shape)}: {geometry} in this format has {shape}")
    if wires is not None and wires.dtype != np.uint8:
        raise TypeError(f"wires are {wires.dtype}: must be uint8")
    if isinstance(rank, int | float | np.generic):
        rank = _integer("rank", rank)
        if not 0 <= rank < geometry.messages:
            raise ValueError(f"rank={rank}: must be from 0 to {geometry.messages - 1}")


def check_seed(fmt: Format, seed) -> None:
    """Raises ValueError or TypeError unless there is a seed for stochastic rounding; with nearest it is not read."""
    if fmt.rounding == "stochastic" and seed is None:
        raise ValueError("seed=None: rounding 'stochastic' needs uint32[2], other numbers for each message")
    if fmt.rounding == "stochastic" and (seed.dtype != np.uint32 or tuple(seed.shape) != (2,)):
        raise TypeError(f"seed is {seed.dtype}{list(seed.shape)}: must be uint32[2]")


def _dtype_name(dtype) -> str:
    return dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or np.dtype(dtype).name


def _integer(key: str, value) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{key}={value!r}: must be an integer, is of type {type(value).__name__}") from None


def ocp_bias(element: str) -> int:
    """Returns what an e8m0 byte carries beyond the scale: OCP's MXINT8 element is k / 64, so the exponent has 2^6."""
    return 6 if element == "int8" else 0


def reciprocal_down(maximum: float) -> np.float32:
    """Returns 1 / Qmax rounded down, so that a maximum of exactly Qmax 2^k never rounds up to the next scale."""
    r = np.float32(1.0 / maximum)
    return r if float(r) * maximum <= 1.0 else np.nextafter(r, np.float32(0))


@functools.cache
def hadamard_signs(block: int) -> np.ndarray:
    """Returns the +-1 Sylvester-Hadamard matrix, float32[B, B]; `block` is a power of two."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < block:
        h = np.block([[h, h], [h, -h]])
    return h


@functools.cache
def block_signs(block: int) -> np.ndarray:
    """Returns the fixed random signs of `signed_hadamard`, float32[B]: the same on every rank and in every version."""
    # A hash of the index instead of a generator, so that a kernel can compute it too.
    return np.where(lowbias32(np.arange(1, block + 1, dtype=np.uint32)) & 1, -1.0, 1.0).astype(np.float32)


# Wellons' lowbias32, and 2^32 divided by the golden ratio: neighbouring messages get seeds that are far apart.
HASH_FACTORS, GOLDEN = (0x7FEB352D, 0x846CA68B), 0x9E3779B9


def lowbias32(x):
    """Returns a hash of uint32, one to one: of an array of numpy or of jax.numpy, inside a kernel too."""
    first, second = map(np.uint32, HASH_FACTORS)
    x = (x ^ (x >> np.uint32(16))) * first
    x = (x ^ (x >> np.uint32(15))) * second
    return x ^ (x >> np.uint32(16))


def packing_parts(bits: int) -> int:
    """Returns how many equal parts of a block share bytes: 2 for 4 bits, 4 for 6, 8 for 3 and 5, 1 for 8."""
    return 8 // math.gcd(8, bits)


def scale_section_lengths(scale: str, n_blocks: int) -> list[int]:
    """Returns the bytes of each scale section of a message."""
    if scale in SCALE_BITS:
        return [round_up(n_blocks, packing_parts(SCALE_BITS[scale])) * SCALE_BITS[scale] // 8]
    return [1] if scale == "site" else [n_blocks] * SCALE_BYTES[scale]


def section_offsets(lengths: list[int]) -> tuple[list[int], int]:
    """Returns where each section of a message starts, and the message's length, in bytes."""
    offsets, end = [], 0
    for length in lengths:
        offsets.append(end)
        end = round_up(end + length, SECTION_BYTES)
    return offsets, round_up(end, MESSAGE_BYTES)


def round_up(n: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
