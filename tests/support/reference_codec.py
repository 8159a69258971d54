"""The wire format a second time, in numpy and from its description alone: nothing here imports taco_jax.

Rotations are summed in float64 and rounded once, so whole messages agree byte for byte wherever the sums of a block are
exact in float32 too: `exact_values` makes such data. Unrotated codecs agree on any data.

Dim letters: M blocks, B elements of a block.
"""

import dataclasses
import fractions
import math

import ml_dtypes
import numpy as np

UNCALIBRATED = -(2**31)


def small_float(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """The magnitudes of a float that ml_dtypes has not, by their codes: bias 2^(e-1) - 1, neither Inf nor NaN."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    codes = [divmod(code, steps) for code in range(steps << exponent_bits)]
    return np.array([2.0 ** (max(e, 1) - bias) * ((e > 0) + m / steps) for e, m in codes], np.float32)


SMALL_FLOATS = {f"e{e}m{m}": small_float(e, m) for e, m in ((3, 1), (2, 2), (1, 3), (1, 2), (1, 1))}
# name: bits, largest value, the dtype of ml_dtypes (None: two's complement integer, or a small float)
ELEMENTS = {
    "e4m3": (8, 448.0, ml_dtypes.float8_e4m3fn),
    "e5m2": (8, 57344.0, ml_dtypes.float8_e5m2),
    "e3m2": (6, 28.0, ml_dtypes.float6_e3m2fn),
    "e2m3": (6, 7.5, ml_dtypes.float6_e2m3fn),
    "e2m1": (4, 6.0, ml_dtypes.float4_e2m1fn),
    "int8": (8, 127.0, None),
    "int6": (6, 31.0, None),
    "int5": (5, 15.0, None),
    "int4": (4, 7.0, None),
    "int3": (3, 3.0, None),
    "e3m1": (5, 24.0, None),
    "e2m2": (5, 7.0, None),
    "e1m3": (5, 3.75, None),
    "e1m2": (4, 3.5, None),
    "e1m1": (3, 3.0, None),
}
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "e8m0": 1, "ue5m3": 1, "paper": 8}
SHORT_SCALES = {"e5m0": 5, "e4m0": 4}
# ue5m3 read as numbers: c = 1..254 is 2^(c // 8 - 15) (1 + (c % 8) / 8), relative to the site scale.
UE5M3 = np.array([2.0 ** (c // 8 - 15) * (1 + c % 8 / 8) for c in range(255)])


@dataclasses.dataclass(frozen=True)
class Reference:
    element: str
    block: int
    rotation: str
    scale: str

    @property
    def bits(self):
        return ELEMENTS[self.element][0]

    @property
    def maximum(self):
        return ELEMENTS[self.element][1]

    def matrix(self) -> np.ndarray:
        """Unnormalised rotation, float64[B, B]: z = x @ matrix / sqrt(B)."""
        i = np.arange(self.block)
        h = np.where(np.bitwise_count(i[:, None] & i[None, :]) % 2, -1.0, 1.0)
        return signs(self.block)[:, None] * h if self.rotation == "signed_hadamard" else h

    def to_blocks(self, x) -> np.ndarray:
        x = np.asarray(x).astype(np.float32).ravel()
        x_MB = np.zeros((-(-x.size // self.block), self.block), np.float32)
        x_MB.ravel()[: x.size] = x
        if self.rotation == "none":
            return x_MB
        return (x_MB.astype(np.float64) @ self.matrix()).astype(np.float32) * np.float32(1 / np.sqrt(self.block))

    def from_blocks(self, z_MB, n: int) -> np.ndarray:
        if self.rotation != "none":
            z_MB = z_MB.astype(np.float64) @ self.matrix().T / np.sqrt(self.block)
        return z_MB.ravel()[:n].astype(np.float32)

    def scales(self, z_MB, exponent=None):
        """(what values are multiplied with, what codes are multiplied with, scale bytes uint8[k, M])."""
        f32 = np.float32
        one = f32(1)
        if self.scale == "paper":
            alpha = f32(448) / np.sqrt((z_MB * z_MB).mean(-1, dtype=f32) + f32(1e-6))
            s = np.abs(z_MB * alpha[:, None]).max(-1) * f32(1 / 448)
            with np.errstate(divide="ignore", invalid="ignore"):
                multiplier = np.where(s == 0, f32(0), alpha * (one / s))
            return multiplier, s / alpha, np.concatenate([planes(alpha), planes(s)])
        s = np.maximum(np.abs(z_MB).max(-1), f32(2.0**-100)) * reciprocal_down(self.maximum)
        if self.scale == "float32":
            return one / s, s, planes(s)
        if self.scale == "bfloat16":
            up = s.astype(ml_dtypes.bfloat16)
            up = np.where(up.astype(f32) < s, np.nextafter(up, ml_dtypes.bfloat16(np.inf)), up).astype(
                ml_dtypes.bfloat16
            )
            return one / up.astype(f32), up.astype(f32), planes(up)
        if self.scale in SHORT_SCALES:
            bits, a = SHORT_SCALES[self.scale], 0 if exponent in (None, UNCALIBRATED) else exponent
            powers = 2.0 ** (np.arange(2**bits - 1) - (2 ** (bits - 1) - 1) + a)
            c = np.minimum(np.searchsorted(powers, s.astype(np.float64)), len(powers) - 1)
            group = 8 // math.gcd(8, bits)
            filled = np.zeros((1, -(-c.size // group) * group), np.uint8)
            filled[0, : c.size] = c
            s = powers[c].astype(f32)
            return one / s, s, pack(filled, bits)[None]
        if self.scale == "ue5m3" and exponent not in (None, UNCALIBRATED):
            relative = s.astype(np.float64) * 2.0**-exponent
            c = np.clip(np.searchsorted(UE5M3, relative), 1, 254)
            s = (UE5M3[c] * 2.0**exponent).astype(f32)
        else:
            # OCP reads an MXINT8 code k as k / 64, so its shared exponent is larger by 6.
            bias = 6 if self.element == "int8" and self.scale == "e8m0" else 0
            mantissa, e = np.frexp(s)
            c = np.clip(np.where(mantissa > 0.5, e, e - 1) + 127 + bias, 1, 254)
            s = np.ldexp(one, c - 127 - bias).astype(f32)
        return one / s, s, c.astype(np.uint8)[None]

    def codes(self, z_MB, multiplier) -> np.ndarray:
        v = np.clip(z_MB * multiplier[:, None], -self.maximum, self.maximum).astype(np.float32)
        dtype = ELEMENTS[self.element][2]
        if self.element in SMALL_FLOATS:
            return round_to(SMALL_FLOATS[self.element], v, self.bits)
        if dtype is None:
            return np.rint(v).astype(np.int8).view(np.uint8) & ((1 << self.bits) - 1)
        return v.astype(dtype).view(np.uint8)

    def values(self, codes) -> np.ndarray:
        dtype = ELEMENTS[self.element][2]
        if dtype is not None:
            return codes.view(dtype).astype(np.float32)
        if self.element in SMALL_FLOATS:
            sign = np.where(codes >> (self.bits - 1), -1, 1).astype(np.float32)
            return sign * SMALL_FLOATS[self.element][codes & ((1 << (self.bits - 1)) - 1)]
        half = 1 << (self.bits - 1)
        return ((codes.astype(np.int32) ^ half) - half).astype(np.float32)

    def encode_blocks(self, z_MB, exponent=None) -> tuple[bytes, np.ndarray]:
        """(the message, the blocks as they are read back)."""
        multiplier, s, scale_bytes = self.scales(z_MB, exponent)
        codes = self.codes(z_MB, multiplier)
        return layout([self.pack(codes), *scale_bytes]), self.values(codes) * s[:, None]

    def encode(self, x, exponent=None) -> bytes:
        return self.encode_blocks(self.to_blocks(x), exponent)[0]

    def round_trip(self, x, exponent=None) -> np.ndarray:
        x = np.asarray(x)
        return self.from_blocks(self.encode_blocks(self.to_blocks(x), exponent)[1], x.size).reshape(x.shape)

    def pack(self, codes_MB) -> np.ndarray:
        return pack(codes_MB, self.bits)

    def unpack(self, packed, n_blocks: int) -> np.ndarray:
        parts = 8 // math.gcd(8, self.bits)
        runs = packed.reshape(n_blocks, parts * self.bits // 8, -1).astype(np.uint64)
        words = sum(runs[:, k] << np.uint64(8 * k) for k in range(runs.shape[1]))
        mask = np.uint64((1 << self.bits) - 1)
        codes = [(words >> np.uint64(self.bits * i) & mask).astype(np.uint8) for i in range(parts)]
        return np.concatenate(codes, axis=1)

    def check(self, message, x, exponent=None) -> None:
        """Fails unless `message` is this format's message of x.

        Byte for byte, but for two things that XLA decides: it may take the 1/sqrt(B) of the rotation into the
        multiplier, and computes the square root of `paper` in its own way. So there a code may be its neighbour where
        the scaled value lies on the border between both, and the words of `paper` may differ by a few units in the last
        place.
        """
        message = np.asarray(message)
        z_MB = self.to_blocks(x)
        expected = np.frombuffer(self.encode_blocks(z_MB, exponent)[0], np.uint8)
        assert message.dtype == np.uint8 and message.shape == expected.shape, (message.dtype, message.shape)
        end = z_MB.size * self.bits // 8
        codes = self.unpack(message[:end], len(z_MB))
        multiplier = self.scales(z_MB, exponent)[0]
        strict = self.codes(z_MB, multiplier)
        wrong = codes != strict
        if self.rotation != "none" and (self.block.bit_length() % 2 == 0 or self.scale == "paper"):
            assert wrong.mean() < 0.01
            for shift in (-1, 1):
                wrong &= codes != self.codes(z_MB, multiplier * np.float32(1 + shift * 2.0**-21))
        assert not wrong.any(), f"{wrong.sum()} codes are wrong: {codes[wrong][:5]} instead of {strict[wrong][:5]}"
        assert (self.pack(codes) == message[:end]).all()
        if self.scale != "paper":
            np.testing.assert_array_equal(message[end:], expected[end:])
            return
        for first in (0, 4):
            words = [
                planes_at(m, end, len(z_MB))[first : first + 4].T.copy().view(np.int32) for m in (message, expected)
            ]
            assert np.abs(words[0] - words[1]).max() <= 4

    def wire_bytes(self, n: int) -> int:
        blocks = -(-n // self.block)
        end = blocks * self.block * self.bits // 8
        if self.scale in SHORT_SCALES:  # scales travel in groups that fill whole bytes
            bits = SHORT_SCALES[self.scale]
            group = 8 // math.gcd(8, bits)
            return 1024 * -(-(128 * -(-end // 128) + -(-blocks // group) * group * bits // 8) // 1024)
        if self.scale == "site":  # one byte for the whole message
            return 1024 * -(-(128 * -(-end // 128) + 1) // 1024)
        for _ in range(SCALE_BYTES[self.scale]):
            end = 128 * -(-end // 128) + blocks
        return 1024 * -(-end // 1024)


REFERENCES = {
    "taco": Reference("e4m3", 128, "hadamard", "ue5m3"),
    "taco_paper": Reference("e4m3", 256, "hadamard", "paper"),
    "e4m3h": Reference("e4m3", 128, "hadamard", "bfloat16"),
    "e4m3": Reference("e4m3", 128, "none", "bfloat16"),
    "e5m2": Reference("e5m2", 128, "none", "bfloat16"),
    "int8h": Reference("int8", 128, "hadamard", "bfloat16"),
    "int6h": Reference("int6", 128, "hadamard", "bfloat16"),
    "int5h": Reference("int5", 128, "hadamard", "bfloat16"),
    "int4h": Reference("int4", 128, "hadamard", "bfloat16"),
    "mxfp8": Reference("e4m3", 32, "none", "e8m0"),
    "mxfp6": Reference("e2m3", 32, "none", "e8m0"),
    "mxfp4": Reference("e2m1", 32, "none", "e8m0"),
    "mxint8": Reference("int8", 32, "none", "e8m0"),
}


def pack(codes_MB, bits: int) -> np.ndarray:
    """Codes -> bytes: element j of the row's g equal parts, first part lowest, is one little-endian number."""
    parts = 8 // math.gcd(8, bits)
    n_bytes = parts * bits // 8
    q = codes_MB.reshape(len(codes_MB), parts, -1).astype(np.uint64)
    shifts = np.arange(parts, dtype=np.uint64) * np.uint64(bits)
    words = np.bitwise_or.reduce(q << shifts[None, :, None], axis=1)
    runs = [(words >> np.uint64(8 * k)).astype(np.uint8) for k in range(n_bytes)]
    return np.concatenate(runs, axis=1).ravel()


def round_to(magnitudes: np.ndarray, v: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the nearest values, ties to the even code; the sign is the highest bit."""
    above = np.minimum(np.searchsorted(magnitudes, np.abs(v)), len(magnitudes) - 1)
    below = np.maximum(above - 1, 0)
    up, down = magnitudes[above] - np.abs(v), np.abs(v) - magnitudes[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (nearest | (np.signbit(v).astype(np.int64) << (bits - 1))).astype(np.uint8)


def planes(words) -> np.ndarray:
    """Little-endian byte planes: [M] of k bytes each -> uint8[k, M]."""
    words = np.ascontiguousarray(words)
    return words.view(np.uint8).reshape(words.size, -1).T


def planes_at(message, end: int, n_blocks: int) -> np.ndarray:
    """The byte planes behind the codes: uint8[k, M]."""
    found, start = [], 128 * -(-end // 128)
    while start + n_blocks <= message.size and len(found) < 8:
        found.append(message[start : start + n_blocks])
        start = 128 * -(-(start + n_blocks) // 128)
    return np.array(found)


def layout(sections) -> bytes:
    message = b""
    for section in sections:
        message = message.ljust(128 * -(-len(message) // 128), b"\0") + section.tobytes()
    return message.ljust(1024 * -(-len(message) // 1024), b"\0")


def reciprocal_down(maximum: float) -> np.float32:
    """The largest float32 that is not above 1 / maximum."""
    exact = fractions.Fraction(1) / fractions.Fraction(maximum)
    r = np.float32(float(exact))
    while fractions.Fraction(float(r)) > exact:
        r = np.nextafter(r, np.float32(0))
    return r


def signs(block: int) -> np.ndarray:
    """The random signs of signed_hadamard: the low bit of lowbias32(i + 1)."""

    def mix(i):
        i ^= i >> 16
        i = i * 0x7FEB352D & 0xFFFFFFFF
        i ^= i >> 15
        i = i * 0x846CA68B & 0xFFFFFFFF
        return i ^ i >> 16

    return np.array([-1.0 if mix(i) & 1 else 1.0 for i in range(1, block + 1)])


def exact_values(rng, shape, dtype=np.float32, limit=127, spread=8) -> np.ndarray:
    """Integers up to `limit` times a power of two that changes from block to block: their rotations are exact."""
    n = math.prod(shape)
    integers = rng.integers(-limit, limit, n, endpoint=True)
    # Changes only every 512 elements, so that no block of a rotation holds two powers.
    powers = np.repeat(rng.integers(-spread, spread, n // 512 + 1, endpoint=True), 512)[:n]
    return np.ldexp(integers.astype(np.float64), powers).reshape(shape).astype(dtype)


def snr_db(x, y) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if (x == y).all():
        return np.inf
    return 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())
