"""The block codec: the pure jnp reference that every kernel is tested against.

For a block x of B elements and the orthonormal Hadamard matrix H:

    z = H x;   s = max(max|z|, 2^-100) / Qmax in f32, rounded UP to the scale format
    q = cast(clip(z / s, -Qmax, Qmax));   x' = H (s q)

Source: TACO (arXiv 2604.24088) for blockwise scaling + Hadamard + FP8, arXiv 2411.09510 for the MX presets. The scale
byte of `taco` (ue5m3, relative to the site scale 2^a) is in `block_scale.py`, the byte layout in `wire.py`, the element
int3_4 of `tah4`, whose blocks have 3 or 4 bits, in `tah.py`.

A block is a run of the flattened array, or, with block="token", the array's last dim: LLM.int8() (arXiv 2208.07339)
scales a token's int8 values so. Such a codec is made one with a number as soon as an array is known (`of`).

Values up to 2^127, half of float32's largest, come back; up to 2^127 / B where blocks are rotated, because a rotation
adds up B values before it scales them; up to a root mean square of 1e18 with the paper's scales, whose mean of squares
has no room above. A block of larger values may come back as NaN, as one with an infinity does.

Dim letters: M blocks of a message, B elements of a block; leading dims ("...") are separate messages.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.formats import (
    CODEC_BLOCKS,
    ELEMENTS,
    ROTATIONS,
    ROUNDINGS,
    SCALES,
    TOKEN,
    UNCALIBRATED,
    packing_parts,
    scale_section_lengths,
    section_offsets,
)
from pallas_kernels.formats import DTYPES as FLOAT_DTYPES
from taco_jax.codec import block_scale, stochastic_rounding, tah, wire
from taco_jax.codec.elements import from_codes, to_codes
from taco_jax.codec.hadamard import rotate, unrotate
from taco_jax.errors import did_you_mean

STATS = ("amax", "signal", "noise", "clipped", "flushed", "count")


def _check_dtype(dtype, name: str) -> None:
    if str(dtype) not in FLOAT_DTYPES:
        raise TypeError(
            f"dtype {dtype}: codec {name!r} takes {', '.join(FLOAT_DTYPES)}; cast first, or use codec 'none'"
        )


def check_choice(key: str, value, valid: tuple[str, ...]) -> None:
    if value in valid:
        return
    hint = did_you_mean(value, valid, otherwise="")
    raise ValueError(f"{key}={value!r} is unknown: {hint}{' ' * bool(hint)}valid are {', '.join(valid)}")


@dataclasses.dataclass(frozen=True)
class Codec:
    """How one message is written as bytes. Frozen and hashable; vary a field with `dataclasses.replace`.

    Args:
      element: e4m3, e5m2, int8, int6, int5, int4, int3, e3m2, e2m3, e3m1, e2m2, e1m3, e2m1, e1m2, e1m1; int3_4: 4 bits
        for the blocks that need them most, 3 for the others (`tah.py`; scale bfloat16 only); "none" sends the values
        as they are.
      block: elements that share one scale, a power of two from 8 to 512 (int3_4: to 256). Or "token": the last dim of
        what is sent, of any size (below 8 bits: one that fills whole bytes), without a rotation. A collective that
        cuts or joins that dim raises ValueError.
      rotation: none, hadamard, signed_hadamard (of each block; experimental: no measurement shows what signs gain).
      scale: float32, bfloat16, e8m0, e5m0 and e4m0 (powers of two in 5 and 4 bits, relative to the site scale), ue5m3
        (one byte, relative to the site scale), site (one power of two for the whole message; experimental: its accuracy
        has not been measured), paper (the paper's two float32: alpha before the rotation, s after it).
      rounding: nearest (even) or stochastic (`encode` then needs a key; experimental: no run has been trained with it).
      token: set by `of` alone: elements of a token, which are the block; 0 where blocks have a size of their own.
    """

    element: str
    block: int | str = 128
    rotation: str = "none"
    scale: str = "bfloat16"
    rounding: str = "nearest"
    token: int = 0

    def __post_init__(self):
        check_choice("element", self.element, (*ELEMENTS, tah.ELEMENT, "none"))
        check_choice("rotation", self.rotation, ROTATIONS)
        check_choice("scale", self.scale, SCALES)
        check_choice("rounding", self.rounding, ROUNDINGS)
        if self.per_token:
            self._check_token()
        elif isinstance(self.block, float) or self.block not in CODEC_BLOCKS:
            raise ValueError(f"block={self.block!r}: must be a power of two from 8 to 512, for example 128, or 'token'")
        if self.mixed:
            tah.check(self.block, self.scale)
        elif self.scale == "site" and not self.exact and ELEMENTS[self.element].nan is None:
            raise ValueError(
                f"scale='site' with element={self.element!r}: the format has no code for a non-finite value; "
                "use an 8-bit float or an integer element, or scale='e8m0'"
            )

    def _check_token(self) -> None:
        if self.token not in (0, self.block):
            raise ValueError(f"token={self.token} with block={self.block!r}: only Codec.of sets it; use block='token'")
        if self.rotation != "none" or self.mixed:
            what = f"element={self.element!r}" if self.mixed else f"rotation={self.rotation!r}"
            raise ValueError(f"block='token' with {what}: a token has any size; use rotation='none', or block=128")
        if self.token and not self.exact:
            parts = packing_parts(ELEMENTS[self.element].bits)
            if self.token % parts:
                raise ValueError(
                    f"codec {self.name!r}: tokens of {self.token} elements of {self.element} do not fill whole bytes; "
                    f"use tokens of a multiple of {parts} elements, or element='int8'"
                )

    def of(self, shape: tuple[int, ...]) -> Codec:
        """This codec for arrays of `shape`: with block="token" the one whose block is the last dim, else itself."""
        if self.block != TOKEN:
            return self
        size = max(1, shape[-1]) if shape else 1
        return dataclasses.replace(self, block=size, token=size)

    @property
    def per_token(self) -> bool:
        """Returns whether a block is a token: the last dim of an array."""
        return self.block == TOKEN or self.token > 0

    @property
    def mixed(self) -> bool:
        """Returns whether blocks choose between two numbers of bits (`tah.py`)."""
        return self.element == tah.ELEMENT

    @property
    def exact(self) -> bool:
        """True for `none`: messages go through `jax.lax` in their own dtype."""
        return self.element == "none"

    @property
    def name(self) -> str:
        """The preset's name, or a description of the fields where no preset has them."""
        if self.token:
            return dataclasses.replace(self, block=TOKEN, token=0).name
        for name, codec in CODECS.items():
            if codec == self:
                return name
        rounding = "" if self.rounding == "nearest" else f"-{self.rounding}"
        return f"{self.element}-{self.block}-{self.rotation}-{self.scale}{rounding}"

    @property
    def bits(self) -> float:
        """Wire bits per element with scales, without the padding of blocks and sections (`none`: 16, bf16).

        Raises ValueError for block="token" before `of`: what a scale costs depends on the token's size.
        """
        if self.exact:
            return 16.0
        self._check_size()
        if self.mixed:
            return tah.bits(self.block)
        return ELEMENTS[self.element].bits + block_scale.bits_per_block(self.scale) / self.block

    def _check_size(self) -> None:
        if self.block == TOKEN:
            raise ValueError(
                f"codec {self.name!r} has a block for each token: say of which size first, with codec.of(shape)"
            )

    def n_blocks(self, n: int) -> int:
        self._check_size()
        return -(-n // self.block)

    def wire_bytes(self, n: int) -> int:
        """Bytes of a message of n elements: codes, then scales; sections at multiples of 128 bytes, all of 1,024."""
        if self.exact:
            return 2 * n
        return section_offsets(self._sections(self.n_blocks(n)))[1] if n else 0

    def _sections(self, n_blocks: int) -> list[int]:
        if self.mixed:
            return tah.section_lengths(self.block, n_blocks)
        codes = n_blocks * self.block * ELEMENTS[self.element].bits // 8
        return [codes, *scale_section_lengths(self.scale, n_blocks)]

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
        codec = self.of(x.shape)
        return codec.encode_blocks(codec.to_blocks(x.reshape(-1)), exponent=exponent, key=key)[0]

    def decode(self, message: jax.Array, shape, dtype, *, exponent: jax.Array | int | None = None) -> jax.Array:
        """Reads a message of `encode` back: uint8[wire_bytes(n)] -> dtype[shape], n = prod(shape).

        A block that held an Inf or NaN is NaN throughout. Raises ValueError where the message's length is not
        wire_bytes(n), TypeError where dtype is not one of the three.
        """
        _check_dtype(jnp.dtype(dtype), self.name)
        n, codec = math.prod(shape), self.of(tuple(shape))
        if message.shape != (codec.wire_bytes(n),) or message.dtype != jnp.uint8:
            raise ValueError(
                f"message is {message.dtype}{list(message.shape)}: {n} elements in codec {self.name!r} are "
                f"uint8[{codec.wire_bytes(n)}]"
            )
        if n == 0:
            return jnp.zeros(shape, dtype)
        z_MB = codec.decode_blocks(message, codec.n_blocks(n), exponent=exponent)
        return codec.from_blocks(z_MB, n, dtype).reshape(shape)

    # The pieces that collectives put together: rotated blocks in float32 (of int3_4 blocks as they are: what a block
    # rotates depends on its values, and only sums of what is the same on every rank are sums).

    def to_blocks(self, x: jax.Array) -> jax.Array:
        """Pads the last dim with zeros to whole blocks and rotates them: [..., n] -> float32[..., M, B]."""
        _check_dtype(x.dtype, self.name)
        *leading, n = x.shape
        padding = self.n_blocks(n) * self.block - n
        if padding:
            x = jnp.concatenate([x, jnp.zeros_like(x, shape=(*leading, padding))], axis=-1)
        blocks = x.reshape(*leading, -1, self.block).astype(jnp.float32)
        return blocks if self.mixed else rotate(blocks, self.rotation)

    def from_blocks(self, z: jax.Array, n: int, dtype) -> jax.Array:
        """The inverse of `to_blocks`: float32[..., M, B] -> dtype[..., n], rotated back and without the padding."""
        x = (z if self.mixed else unrotate(z, self.rotation)).astype(dtype)
        x = x.reshape(*x.shape[:-2], -1)
        return x if x.shape[-1] == n else x[..., :n]

    def encode_blocks(self, z, *, exponent=None, key=None) -> tuple[jax.Array, jax.Array]:
        """Rotated blocks float32[..., M, B] -> (messages uint8[..., wire_bytes(M * B)], largest block scale float32[]).

        Stochastic rounding takes its noise from `stochastic_rounding.py`: a hash of the key's seed, the element's
        place in its message, and the message's place in the flattened leading dims.

        The largest scale is max|z| / Qmax before rounding and clamping: 0 for a message of zeros, NaN where z is not
        finite.
        """
        if self.exact:
            raise ValueError("codec 'none' writes no bytes: use jax.lax, or the collectives of taco_jax, which do")
        seed = self.seed(key)
        random = None if seed is None else stochastic_rounding.uniform(seed, z.shape)
        if self.mixed:
            return tah.encode(z, self.rotation, random)
        element = ELEMENTS[self.element]
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
        """Returns the seed that stochastic rounding draws from, uint32[2]; None with rounding to nearest."""
        if self.rounding == "nearest":
            return None
        if key is None:
            raise ValueError("rounding='stochastic' needs key=, a jax.random key, a new one for each message")
        return stochastic_rounding.seed_of(key)

    def decode_blocks(self, messages: jax.Array, n_blocks: int, *, exponent=None) -> jax.Array:
        """Messages uint8[..., wire_bytes] -> rotated blocks float32[..., M, B]."""
        sections = wire.disassemble(messages, self._sections(n_blocks))
        if self.mixed:
            return tah.decode(sections, n_blocks, self.block, self.rotation)
        element, (packed, *planes) = ELEMENTS[self.element], sections
        packed = packed.reshape(*packed.shape[:-1], n_blocks, self.block * element.bits // 8)
        codes = wire.unpack(packed, element.bits)
        values = from_codes(element, codes)
        if self.scale == "site" and not element.is_float:
            values = jnp.where(codes == element.nan, jnp.nan, values)
        return values * block_scale.read(self.scale, element, planes, exponent, n_blocks)[..., None]

    def rounded_blocks(self, z: jax.Array) -> jax.Array:
        """Returns what `decode_blocks` makes of the messages of `encode_blocks(z)`, float32[..., M, B], bit for bit.

        No bytes are written on the way, which compiles three times as fast where only the values are wanted (int3_4
        blocks go through their bytes).
        """
        if self.mixed:
            messages, _ = self.encode_blocks(z)
            return self.decode_blocks(messages, z.shape[-2])
        element = ELEMENTS[self.element]
        scales = block_scale.compute(self.scale, element, z, None)
        v = jnp.where(scales.finite[..., None], z * scales.multiplier[..., None], 0.0)
        read = block_scale.read(self.scale, element, scales.planes, None, z.shape[-2])
        return from_codes(element, to_codes(element, v, None)) * read[..., None]

    def measure(self, z: jax.Array, messages: jax.Array, *, exponent=None) -> jax.Array:
        """Returns what a message did to its blocks: float32[5] sums of signal and noise power, clipped, flushed, all
        elements.

        Clipped: |z| lies beyond what the block's scale can express (int3_4: never). Flushed: z is not zero and its code
        is.
        """
        decoded = self.decode_blocks(messages, z.shape[-2], exponent=exponent)
        if self.mixed:
            limit = jnp.full(z.shape[:-1], jnp.inf)
        else:
            element, planes = ELEMENTS[self.element], self._planes(messages, z.shape[-2])
            scales = block_scale.read(self.scale, element, planes, exponent, z.shape[-2])
            limit = scales * (element.maximum * (1 + 2.0**-20))
        sums = (z * z, (decoded - z) ** 2, jnp.abs(z) > limit[..., None], (z != 0) & (decoded == 0))
        sums = [jnp.sum(s, dtype=jnp.float32) for s in sums]
        return jnp.stack([*sums, jnp.full_like(sums[0], z.size)])

    def _planes(self, messages: jax.Array, n_blocks: int) -> list[jax.Array]:
        return wire.disassemble(messages, self._sections(n_blocks))[1:]


AUTO = "auto"
"""Stands for the codec that a use is recommended (`taco_jax.compression.recommended`); no codec by itself."""
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
    "int8_token": Codec("int8", TOKEN, "none", "bfloat16"),
    "tah4": Codec(tah.ELEMENT, 128, "hadamard", "bfloat16"),
    "mxfp8": Codec("e4m3", 32, "none", "e8m0"),
    "mxfp6": Codec("e2m3", 32, "none", "e8m0"),
    "mxfp4": Codec("e2m1", 32, "none", "e8m0"),
    "mxint8": Codec("int8", 32, "none", "e8m0"),
    "none": Codec("none", 128, "none", "bfloat16"),
}


def as_codec(codec: str | Codec | None, key: str = "codec") -> Codec:
    """Returns the Codec of a Codec, of None (`none`) or of a text: "PRESET[,FIELD=VALUE...]", such as "int4h,block=32".

    Raises:
      ValueError: no such preset, field or value; it names `key`, the value and the nearest that there is. `auto`, which
        stands for another codec in each use.
      TypeError: neither a text nor a Codec.
    """
    if codec is None:
        return CODECS["none"]
    if isinstance(codec, Codec):
        return codec
    if codec == AUTO:
        raise ValueError(f"{key}='auto': takes the codec of a use, and there is no use here; name one, such as 'int8h'")
    if isinstance(codec, str) and "," in codec:
        return _changed_preset(codec, key)
    check_choice(key, codec, tuple(CODECS))
    return CODECS[codec]


def _changed_preset(text: str, key: str) -> Codec:
    name, *changes = text.split(",")
    if name == AUTO:
        raise ValueError(f"{key}={text!r}: fields of 'auto' cannot be changed; name a codec, such as 'int8h,block=64'")
    fields: dict[str, int | str] = {}
    known = [field.name for field in dataclasses.fields(Codec)]
    for change in changes:
        field, _, value = change.partition("=")
        if field not in known or not value:
            hint = did_you_mean(field, known, otherwise=f"fields are {', '.join(known)}")
            raise ValueError(f"{key}={text!r}: {change!r} must be FIELD=VALUE; {hint}")
        if field in fields:
            raise ValueError(f"{key}={text!r}: {field} is given twice; give it once")
        fields[field] = int(value) if value.isdecimal() else value
    try:
        return dataclasses.replace(as_codec(name, key), **fields)
    except ValueError as error:
        raise ValueError(f"{key}={text!r}: {error}") from None


__all__ = ["AUTO", "CODECS", "STATS", "UNCALIBRATED", "Codec", "as_codec"]
