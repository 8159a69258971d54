"""What tests of the Triton kernels share: codecs, values whose rotations are exact, and the comparison with jnp."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.triton import operations
from taco_jax.codec import CODECS, Codec
from taco_jax.compression import dispatch

# The presets that have kernels, and the element that none of them uses.
CODECS_WITH_KERNELS = {
    **{name: codec for name, codec in CODECS.items() if not (codec.exact or dispatch.without_format(codec))},
    "e3m2": Codec("e3m2", 64, "hadamard", "e8m0"),
}
DATA = ("grid", "zeros", "inf", "nan", "large", "small")


def values(kind: str, size: int, dtype) -> np.ndarray:
    """Multiples of 1/64 below 8, with special values: sums of 256 of them are exact in float32."""
    rng = np.random.default_rng(size)
    x = rng.integers(-511, 512, size) / 64
    if kind in ("zeros", "small"):
        x[:] = 0
    half = str(dtype) == "float16"
    special = dict(inf=np.inf, nan=np.nan, large=60000 if half else 1e30, small=6e-8 if half else 1e-30)
    if kind in special:
        x[size // 2] = special[kind]
    return x.astype(np.float32).astype(jnp.dtype(dtype))


class Check:
    """All operations of one codec and geometry against the jnp codec's; `errors` says what differs."""

    def __init__(self, codec, geometry, x, exponent=None, key=None):
        self.codec, self.geometry, self.exponent, self.key = codec, geometry, exponent, key
        self.x, self.fmt, self.errors = x, dispatch.to_format(codec), []
        # With these, sums of a rotation of what codes say are exact.
        self.exact_sums = codec.rotation == "none"
        few_bits = codec.element not in ("e4m3", "e5m2") and codec.scale != "float32"
        self.exact_decode = self.exact_sums or few_bits

    def run(self, transform=lambda f: f) -> list[str]:
        """transform: what to do to the function that runs the kernels, for instance jax.jit."""
        with jax.default_device(jax.devices("cpu")[0]):
            # These programs run once.
            fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
            theirs = jax.jit(self._theirs, compiler_options=fast)(jnp.asarray(self.x))
            theirs = jax.tree.map(np.asarray, theirs)
            seed = self.codec.seed(self.key)
            seed = None if seed is None else np.asarray(seed)
        ours = transform(self._ours)(jnp.asarray(self.x), jnp.asarray(theirs["encode"][0]), seed)
        for what in ("encode", "reduce_encode"):
            wires, largest = theirs[what]
            # XLA makes (S c) m of a rotation's constant c and a block's multiplier m into S (c m), which rounds once: a
            # value within that of a border falls on its other side, some four of a million in 8 bits.
            self._same(what, ours[what][0], wires, 0 if self.codec.rotation == "none" else 2e-5)
            largest = np.where(np.isfinite(largest), largest, np.nan).astype(np.float32).reshape(())
            self._same(f"{what}: largest", ours[what][1], largest)
        for what in ("reduce_decode", "sum_decode", "decode"):
            exact = self.exact_decode if what == "decode" else self.exact_sums
            (self._same if exact else self._near)(what, ours[what], theirs[what])
        return self.errors

    def _theirs(self, x):
        """encode, reduce_encode of the last rank, reduce_decode of the first, and so on, by the jnp codec."""
        codec, g, a, jnp_codec = self.codec, self.geometry, self.exponent, dict(backend="jnp")
        wires, measure = dispatch.encode(codec, g, x, a, self.key, **jnp_codec)
        wire, sum_measure = dispatch.reduce_encode(codec, g, wires, x, g.messages - 1, a, self.key, **jnp_codec)
        return {
            "encode": (wires, measure[0]),
            "reduce_encode": (wire, sum_measure[0]),
            "reduce_decode": dispatch.reduce_decode(codec, g, wires, x, 0, a, **jnp_codec),
            "sum_decode": dispatch.sum_decode(codec, wires, g.per_message, x.dtype, a, **jnp_codec),
            "decode": dispatch.decode(codec, g, wires, x.dtype, a, **jnp_codec) if g.is_whole else jnp.zeros(1),
        }

    def _ours(self, x, wires, seed):
        fmt, g, a = self.fmt, self.geometry, self.exponent
        return {
            "encode": operations.encode(fmt, g, x, a, seed),
            "reduce_encode": operations.reduce_encode(fmt, g, wires, x, g.messages - 1, a, seed),
            "reduce_decode": operations.reduce_decode(fmt, g, wires, x, 0, a),
            "sum_decode": operations.sum_decode(fmt, wires, g.per_message, x.dtype, a),
            "decode": operations.decode(fmt, g, wires, x.dtype, a) if g.is_whole else jnp.zeros(1),
        }

    def _same(self, what, ours, theirs, most=0):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            self.errors.append(f"{what}: {ours.dtype}{ours.shape}, not {theirs.dtype}{theirs.shape}")
            return
        differ = (ours != theirs) & ~((ours != ours) & (theirs != theirs))
        if differ.sum() > most * differ.size:
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            self.errors.append(f"{what}: {differ.sum()} differ, at {at}: {ours[at]} and not {theirs[at]}")

    def _near(self, what, ours, theirs):
        """Off by the last bits of what is added up, and by one rounding of the result."""
        ours, theirs = (np.asarray(y, np.float32) for y in (ours, theirs))
        finite = np.isfinite(theirs)
        if ours.shape != theirs.shape or (np.isfinite(ours) != finite).any():
            self.errors.append(f"{what}: other elements are finite")
        elif finite.any():
            rounding = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 0}[str(self.x.dtype)]
            magnitude = np.abs(theirs[finite])
            error = np.abs(ours - theirs)[finite]
            if (error > magnitude * rounding + magnitude.max() * 2.0**-18 + 1e-38).any():
                self.errors.append(f"{what}: off by up to {error.max()} of {magnitude.max()}")
