"""The block codec: the pure jnp reference that every kernel is tested against.

For a block x of B elements and the orthonormal Hadamard matrix H:

    z = H x;   s = max(max|z|, 2^-100) / Qmax in f32, rounded UP to the scale format
    q = cast(clip(z / s, -Qmax, Qmax));   x' = H (s q)

Source: TACO (arXiv 2604.24088) for blockwise scaling + Hadamard + FP8, arXiv 2411.09510 for the MX presets. The scale
byte of `taco` (ue5m3, relative to the site scale 2^a) is in `block_scale.py`, the byte layout in `wire.py`.

Dim letters: M blocks of a message, B elements of a block; leading dims ("...") are separate messages.
"""

from __future__ import annotations

import dataclasses
import difflib
import math

import jax
import jax.numpy as jnp

from taco_jax import block_scale, noise, wire
from taco_jax.block_scale import UNCALIBRATED
from taco_jax.elements import ELEMENTS, from_codes, to_codes
from taco_jax.hadamard import ROTATIONS, rotate, unrotate

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
ROUNDINGS = ("nearest", "stochastic")
STATS = ("amax", "signal", "noise", "clipped", "flushed", "count")


def _check_dtype(dtype, name: str) -> None:
    if str(dtype) not in FLOAT_DTYPES:
        raise TypeError(
            f"dtype {dtype}: codec {name!r} takes {', '.join(FLOAT_DTYPES)}; cast first, or use codec 'none'"
        )


def check_choice(key: str, value, valid: tuple[str, ...]) -> None:
    if value in valid:
        return
    near = difflib.get_close_matches(str(value), valid, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{key}={value!r} is unknown: {hint}valid are {', '.join(valid)}")


@dataclasses.dataclass(frozen=True)
class Codec:
    """How one message is written as bytes. Frozen and hashable; vary a field with `dataclasses.replace`.

    Args:
      element: e4m3, e5m2, int8, int6, int5, int4, e3m2, e2m3, e2m1; "none" sends the values as they are.
      block: elements that share one scale, a power of two from 8 to 512.
      rotation: none, hadamard, signed_hadamard (of each block).
      scale: float32, bfloat16, e8m0, ue5m3 (one byte, relative to the site scale), site (one power of two for the whole
        message), paper (the paper's two float32: alpha before the rotation, s after it).
      rounding: nearest (even) or stochastic (`encode` then needs a key).
    """

    element: str
    block: int = 128
    rotation: str = "none"
    scale: str = "bfloat16"
    rounding: str = "nearest"

    def __post_init__(self):
        check_choice("element", self.element, (*ELEMENTS, "none"))
        check_choice("rotation", self.rotation, ROTATIONS)
        check_choice("scale", self.scale, block_scale.SCALES)
        check_choice("rounding", self.rounding, ROUNDINGS)
        if isinstance(self.block, float) or self.block not in (8, 16, 32, 64, 128, 256, 512):
            raise ValueError(f"block={self.block!r}: must be a power of two from 8 to 512, for example 128")
        if self.scale == "site" and not self.exact and ELEMENTS[self.element].nan is None:
            raise ValueError(
                f"scale='site' with element={self.element!r}: the format has no code for a non-finite value; "
                "use an 8-bit float or an integer element, or scale='e8m0'"
            )

    @property
    def exact(self) -> bool:
        """True for `none`: messages go through `jax.lax` in their own dtype."""
        return self.element == "none"

    @property
    def name(self) -> str:
        """The preset's name, or a description of the fields where no preset has them."""
        for name, codec in CODECS.items():
            if codec == self:
                return name
        rounding = "" if self.rounding == "nearest" else f"-{self.rounding}"
        return f"{self.element}-{self.block}-{self.rotation}-{self.scale}{rounding}"

    @property
    def bits(self) -> float:
        """Wire bits per element with scales, without the padding of blocks and sections (`none`: 16, bf16)."""
        if self.exact:
            return 16.0
        return ELEMENTS[self.element].bits + 8 * block_scale.bytes_per_block(self.scale) / self.block

    def n_blocks(self, n: int) -> int:
        return -(-n // self.block)

    def wire_bytes(self, n: int) -> int:
        """Bytes of a message of n elements: codes, then scales; sections at multiples of 128 bytes, all of 1,024."""
        if self.exact:
            return 2 * n
        return wire.section_offsets(self._sections(self.n_blocks(n)))[1] if n else 0

    def _sections(self, n_blocks: int) -> list[int]:
        codes = n_blocks * self.block * ELEMENTS[self.element].bits // 8
        return [codes, *block_scale.section_lengths(self.scale, n_blocks)]

    # One tensor <-> one message.

    def encode(
        self, x: jax.Array, *, exponent: jax.Array | int | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Writes x as one message.

        Args:
          x: bfloat16, float16 or float32, any shape; flattened, the last block padded with zeros.
          exponent: int32 scalar a of the site scale 2^a (scales ue5m3 and site); None or UNCALIBRATED: no site scale.
          key: a PRNG key, needed by stochastic rounding.

        Returns:
          uint8[wire_bytes(x.size)].

        Raises:
          TypeError: x is not one of the three dtypes. ValueError: stochastic rounding without a key, or codec `none`.
        """
        if x.size == 0:
            return jnp.zeros((0,), jnp.uint8)
        return self.encode_blocks(self.to_blocks(x.reshape(-1)), exponent=exponent, key=key)[0]

    def decode(self, message: jax.Array, shape, dtype, *, exponent: jax.Array | int | None = None) -> jax.Array:
        """Reads a message of `encode` back: uint8[wire_bytes(n)] -> dtype[shape], n = prod(shape).

        A block that held an Inf or NaN is NaN throughout. Raises ValueError where the message's length is not
        wire_bytes(n), TypeError where dtype is not one of the three.
        """
        _check_dtype(jnp.dtype(dtype), self.name)
        n = math.prod(shape)
        if message.shape != (self.wire_bytes(n),) or message.dtype != jnp.uint8:
            raise ValueError(
                f"message is {message.dtype}{list(message.shape)}: {n} elements in codec {self.name!r} are "
                f"uint8[{self.wire_bytes(n)}]"
            )
        if n == 0:
            return jnp.zeros(shape, dtype)
        z_MB = self.decode_blocks(message, self.n_blocks(n), exponent=exponent)
        return self.from_blocks(z_MB, n, dtype).reshape(shape)

    # The pieces that collectives put together: rotated blocks in float32.

    def to_blocks(self, x: jax.Array) -> jax.Array:
        """Pads the last dim with zeros to whole blocks and rotates them: [..., n] -> float32[..., M, B]."""
        _check_dtype(x.dtype, self.name)
        *leading, n = x.shape
        padding = self.n_blocks(n) * self.block - n
        if padding:
            x = jnp.concatenate([x, jnp.zeros_like(x, shape=(*leading, padding))], axis=-1)
        return rotate(x.reshape(*leading, -1, self.block).astype(jnp.float32), self.rotation)

    def from_blocks(self, z: jax.Array, n: int, dtype) -> jax.Array:
        """The inverse of `to_blocks`: float32[..., M, B] -> dtype[..., n], rotated back and without the padding."""
        x = unrotate(z, self.rotation).astype(dtype)
        x = x.reshape(*x.shape[:-2], -1)
        return x if x.shape[-1] == n else x[..., :n]

    def encode_blocks(self, z, *, exponent=None, key=None) -> tuple[jax.Array, jax.Array]:
        """Rotated blocks float32[..., M, B] -> (messages uint8[..., wire_bytes(M * B)], largest block scale float32[]).

        Stochastic rounding takes its noise from `noise.py`: a hash of the key's seed, the element's place in its
        message, and the message's place in the flattened leading dims.

        The largest scale is max|z| / Qmax before rounding and clamping: 0 for a message of zeros, NaN where z is not
        finite.
        """
        if self.exact:
            raise ValueError("codec 'none' writes no bytes: use jax.lax, or the collectives of taco_jax, which do")
        element, seed = ELEMENTS[self.element], self.seed(key)
        random = None if seed is None else noise.uniform(seed, z.shape)
        scales = block_scale.compute(self.scale, element, z, exponent)
        # A block with an Inf or NaN is marked by its scale (or its codes); zeros keep its codes defined.
        v = jnp.where(scales.finite[..., None], z * scales.multiplier[..., None], 0.0)
        codes = to_codes(element, v, random)
        if self.scale == "site":
            codes = jnp.where(scales.finite[..., None], codes, jnp.uint8(element.nan))
        packed = wire.pack(codes, element.bits)
        packed = packed.reshape(*packed.shape[:-2], packed.shape[-2] * packed.shape[-1])
        return wire.assemble([packed, *scales.planes]), scales.largest

    def seed(self, key: jax.Array | None) -> jax.Array | None:
        """What stochastic rounding draws from, uint32[2]; None with rounding to nearest."""
        if self.rounding == "nearest":
            return None
        if key is None:
            raise ValueError("rounding='stochastic' needs key=, a jax.random key, a new one for each message")
        return noise.seed_of(key)

    def decode_blocks(self, messages: jax.Array, n_blocks: int, *, exponent=None) -> jax.Array:
        """Messages uint8[..., wire_bytes] -> rotated blocks float32[..., M, B]."""
        element = ELEMENTS[self.element]
        packed, *planes = wire.disassemble(messages, self._sections(n_blocks))
        packed = packed.reshape(*packed.shape[:-1], n_blocks, self.block * element.bits // 8)
        codes = wire.unpack(packed, element.bits)
        values = from_codes(element, codes)
        if self.scale == "site" and not element.is_float:
            values = jnp.where(codes == element.nan, jnp.nan, values)
        return values * block_scale.read(self.scale, element, planes, exponent)[..., None]

    def measure(self, z: jax.Array, messages: jax.Array, *, exponent=None) -> jax.Array:
        """What a message did to its blocks: float32[5] sums of signal and noise power, clipped, flushed, all elements.

        Clipped: |z| lies beyond what the block's scale can express. Flushed: z is not zero and its code is.
        """
        decoded = self.decode_blocks(messages, z.shape[-2], exponent=exponent)
        scale = block_scale.read(self.scale, ELEMENTS[self.element], self._planes(messages, z.shape[-2]), exponent)
        limit = scale * (ELEMENTS[self.element].maximum * (1 + 2.0**-20))
        sums = (z * z, (decoded - z) ** 2, jnp.abs(z) > limit[..., None], (z != 0) & (decoded == 0))
        sums = [jnp.sum(s, dtype=jnp.float32) for s in sums]
        return jnp.stack([*sums, jnp.full_like(sums[0], z.size)])

    def _planes(self, messages: jax.Array, n_blocks: int) -> list[jax.Array]:
        return wire.disassemble(messages, self._sections(n_blocks))[1:]


CODECS: dict[str, Codec] = {
    "taco": Codec("e4m3", 128, "hadamard", "ue5m3"),
    "taco_paper": Codec("e4m3", 256, "hadamard", "paper"),
    "e4m3h": Codec("e4m3", 128, "hadamard", "bfloat16"),
    "e4m3": Codec("e4m3", 128, "none", "bfloat16"),
    "e5m2": Codec("e5m2", 128, "none", "bfloat16"),
    "int8h": Codec("int8", 128, "hadamard", "bfloat16"),
    "int6h": Codec("int6", 128, "hadamard", "bfloat16"),
    "int5h": Codec("int5", 128, "hadamard", "bfloat16"),
    "int4h": Codec("int4", 128, "hadamard", "bfloat16"),
    "mxfp8": Codec("e4m3", 32, "none", "e8m0"),
    "mxfp6": Codec("e2m3", 32, "none", "e8m0"),
    "mxfp4": Codec("e2m1", 32, "none", "e8m0"),
    "mxint8": Codec("int8", 32, "none", "e8m0"),
    "none": Codec("none", 128, "none", "bfloat16"),
}


def as_codec(codec: str | Codec | None, key: str = "codec") -> Codec:
    """A preset's name or a Codec -> the Codec; None is `none`. Else a ValueError with `key` and the nearest preset."""
    if codec is None:
        return CODECS["none"]
    if isinstance(codec, Codec):
        return codec
    check_choice(key, codec, tuple(CODECS))
    return CODECS[codec]


__all__ = ["CODECS", "STATS", "UNCALIBRATED", "Codec", "as_codec"]
