"""The number format and the message layout, as kernels need them: static, hashable, and free of arrays.

These are the facts of `taco_jax` (`elements.py`, `block_scale.py`, `wire.py`) that a kernel compiles in; a test holds
the two equal. Bytes on the wire: codes, then scales, one section for each byte plane of a scale; sections start at
multiples of 128 bytes, a message is a multiple of 1,024 bytes.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

import numpy as np

SECTION_BYTES = 128
MESSAGE_BYTES = 1024
# The int32 exponent of a site that has seen no data yet, and the largest |exponent| that a kernel uses.
UNCALIBRATED = -(2**31)
MAX_EXPONENT = 111
# Block maxima are clamped here, so that scales and their reciprocals are normal float32.
TINY = np.float32(2.0**-100)

# name -> (bits, maximum, stored mantissa bits or None for an integer, exponent of the smallest normal, code of NaN)
ELEMENTS = {
    "e4m3": (8, 448.0, 3, -6, 0x7F),
    "e5m2": (8, 57344.0, 2, -14, 0x7E),
    "int8": (8, 127.0, None, 0, 0x80),
    "int6": (6, 31.0, None, 0, 0x20),
    "int5": (5, 15.0, None, 0, 0x10),
    "int4": (4, 7.0, None, 0, 0x08),
    "e3m2": (6, 28.0, 2, -2, None),
    "e2m3": (6, 7.5, 3, 0, None),
    "e2m1": (4, 6.0, 1, 0, None),
}
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "e8m0": 1, "ue5m3": 1, "site": 0}
ROTATIONS = ("none", "hadamard", "signed_hadamard")
ROUNDINGS = ("nearest", "stochastic")
DTYPES = ("bfloat16", "float16", "float32")
CODEC_BLOCKS = (8, 16, 32, 64, 128, 256, 512)
BLOCKS = (32, 64, 128, 256)  # that kernels have


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
            ("element", tuple(ELEMENTS)), ("rotation", ROTATIONS), ("scale", tuple(SCALE_BYTES)),
            ("rounding", ROUNDINGS), ("block", CODEC_BLOCKS),
        ):  # fmt: skip
            value = getattr(self, field)
            if value not in valid or isinstance(value, float):
                raise ValueError(f"Format.{field}={value!r}: must be one of {', '.join(map(str, valid))}")

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return ELEMENTS[self.element][0]

    @property
    def maximum(self) -> float:
        return ELEMENTS[self.element][1]

    @property
    def mantissa(self) -> int | None:
        return ELEMENTS[self.element][2]

    @property
    def min_exponent(self) -> int:
        return ELEMENTS[self.element][3]

    @property
    def nan(self) -> int | None:
        return ELEMENTS[self.element][4]

    @property
    def is_float(self) -> bool:
        return self.mantissa is not None

    @property
    def scale_bias(self) -> int:
        """What an e8m0 byte carries beyond the scale: OCP's MXINT8 element is k / 64."""
        return 6 if self.scale == "e8m0" and self.element == "int8" else 0

    @property
    def reciprocal_maximum(self) -> np.float32:
        """1 / Qmax rounded down, so that a maximum of exactly Qmax 2^k never rounds up to the next scale."""
        r = np.float32(1.0 / self.maximum)
        return r if float(r) * self.maximum <= 1.0 else np.nextafter(r, np.float32(0))

    def n_blocks(self, n: int) -> int:
        return -(-n // self.block)

    def sections(self, n: int) -> list[tuple[int, int]]:
        """(offset, length) in bytes of the codes and of each scale plane in a message of n elements."""
        blocks = self.n_blocks(n)
        planes = [1] if self.scale == "site" else [blocks] * SCALE_BYTES[self.scale]
        offset, out = 0, []
        for length in (blocks * self.block * self.bits // 8, *planes):
            out.append((offset, length))
            offset = _round_up(offset + length, SECTION_BYTES)
        return out

    def wire_bytes(self, n: int) -> int:
        """Bytes of a message of n elements."""
        offset, length = self.sections(n)[-1]
        return _round_up(offset + length, MESSAGE_BYTES) if n else 0


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


@functools.cache
def hadamard_signs(block: int) -> np.ndarray:
    """The +-1 Sylvester-Hadamard matrix, float32[B, B]."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < block:
        h = np.block([[h, h], [h, -h]])
    return h


@functools.cache
def block_signs(block: int) -> np.ndarray:
    """The fixed random signs of `signed_hadamard`, float32[B]: lowbias32 of the index, its lowest bit."""
    i = np.arange(1, block + 1, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    i ^= i >> np.uint64(16)
    i = (i * np.uint64(0x7FEB352D)) & mask
    i ^= i >> np.uint64(15)
    i = (i * np.uint64(0x846CA68B)) & mask
    i ^= i >> np.uint64(16)
    return np.where(i & np.uint64(1), -1.0, 1.0).astype(np.float32)


def packing_parts(bits: int) -> int:
    """Equal parts of a block whose elements share bytes: 2 for 4 bits, 4 for 6, 8 for 5, 1 for 8."""
    return 8 // math.gcd(8, bits)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
