"""The Triton kernels in Triton's own interpreter, on the CPU, against the jnp codec: byte for byte.

Where values of a test are such that sums of a rotation are exact, in whatever order, bytes must be equal. Rotating back
a sum of several wires, or of float32 scales, is not exact: there the last bits may differ.

Triton decides when it is imported whether it interprets. So one process of its own, this file run as a program, runs
all cases, and the tests read what it found.
"""

import importlib.util
import json
import os
import pathlib
import sys

import numpy as np
import pytest
from helpers import run_python
from pairs import pairwise

NAMES = (
    "taco", "e4m3h", "e4m3", "e5m2", "int8h", "int6h", "int5h", "int4h", "mxfp8", "mxfp6", "mxfp4", "mxint8", "e3m2",
)  # fmt: skip
CASES = pairwise(
    name=NAMES,
    dtype=("bfloat16", "float16", "float32"),
    size=(1, 7, 127, 128, 129, 8191, 8193),
    messages=(1, 4),
    data=("grid", "zeros", "inf", "nan", "large", "small"),
)
# The fields that presets leave out.
VARIANTS = pairwise(
    element=("e4m3", "e5m2", "int8", "int5", "e2m3", "e2m1"),
    block=(32, 64, 256),
    rotation=("hadamard", "signed_hadamard", "none"),
    scale=("float32", "bfloat16", "e8m0", "ue5m3", "site"),
    rounding=("nearest", "stochastic"),
    exponent=(None, -3, 5),
    hardware_cast=(True, False),
)
VARIANTS = [v for v in VARIANTS if v[3] != "site" or v[0] not in ("e2m3", "e2m1")]


def _identity(case) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module")
def found():
    """Case -> the list of what differs, of all cases."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'triton>=3.6'")
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parent, here.parent.parent)))
    process = run_python([__file__], devices=1, env={"TRITON_INTERPRET": "1", "PYTHONPATH": path}, timeout=500)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES, ids=_identity)
def test_presets_equal_the_jnp_codec(found, case):
    assert found[_identity(case)] == []


@pytest.mark.parametrize("case", VARIANTS, ids=_identity)
def test_other_codecs_equal_the_jnp_codec(found, case):
    assert found[_identity(case)] == []


@pytest.mark.parametrize("name", ["a chunk of every message", "many ranks", "varying in shard_map"])
def test_also(found, name):
    assert found[name] == []


# What follows runs in the process of its own.


class Pointer:
    """A numpy array as the interpreter expects a tensor of torch."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def _self(self, *_, **__):
        return self

    def _nothing(self, *_):
        return 0

    untyped_storage = cpu = new_empty = _self
    set_ = copy_ = storage_offset = size = stride = _nothing


def repair_interpreter():
    """Triton 3.6's interpreter cuts floats off where it should round, multiplies the bits of bfloat16, asks numpy for
    what 2.5 no longer does, and patches its language anew for each call of a function, which is slow."""
    import ml_dtypes
    import triton.language as tl
    from triton.runtime import interpreter

    small = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}

    def real(handle):
        return handle.data.view(small[handle.dtype.scalar.name]) if handle.dtype.scalar.name in small else handle.data

    def cast(self, source, to, *_):
        data = real(source).astype(small.get(to.scalar.name, interpreter._get_np_dtype(to.scalar)))
        return interpreter.TensorHandle(data.view(interpreter._get_np_dtype(to.scalar)), to.scalar)

    def dot(self, a, b, d, *_):
        product = np.matmul(real(a).astype(np.float32), real(b).astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    builder.cast_impl = builder.create_fp_to_fp = cast
    builder.create_dot = dot
    patch, patched = interpreter._patch_lang, set()

    class Scope:
        def restore(self):
            pass

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
            tl.tensor.__index__ = lambda self: self.handle.data.item()
        return Scope()

    interpreter._patch_lang = patch_once


def interpret(call):
    """A launcher: runs a kernel in the interpreter."""
    import jax.numpy as jnp

    from pallas_kernels.triton import kernels

    arrays = [np.array(x) for x in call.arrays]
    # What a kernel does not write is seen, but for arrays that it writes in place.
    outputs = [np.full(y.shape, 77).astype(y.dtype) for y in call.outputs]
    for source, target in call.aliases.items():
        outputs[target] = arrays[source]
    getattr(kernels, call.kernel)[call.grid](*map(Pointer, arrays), *call.sizes, *map(Pointer, outputs), R=call.recipe)
    return [jnp.asarray(y) for y in outputs]


def values(kind: str, size: int, dtype):
    """Multiples of 1/64 below 8, with special values: sums of 256 of them are exact in float32."""
    rng = np.random.default_rng(size)
    x = rng.integers(-511, 512, size) / 64
    if kind in ("zeros", "small"):
        x[:] = 0
    half = str(dtype) == "float16"
    special = dict(inf=np.inf, nan=np.nan, large=60000 if half else 1e30, small=6e-8 if half else 1e-30)
    if kind in special:
        x[size // 2] = special[kind]
    return x.astype(np.float32).astype(dtype)


class Check:
    """All five operations of one codec and geometry against the jnp codec's."""

    def __init__(self, codec, geometry, x, exponent=None, key=None):
        from taco_jax import backend

        self.codec, self.geometry, self.exponent, self.key = codec, geometry, exponent, key
        self.x, self.fmt, self.errors = x, backend.to_format(codec), []
        # Sums of a rotation of what codes say are exact unless codes or scales have many bits.
        self.exact_sums = codec.rotation == "none"
        self.exact_decode = self.exact_sums or (codec.element not in ("e4m3", "e5m2") and codec.scale != "float32")

    def reference(self, x, a, key):
        """What the jnp codec gives: encode, reduce_encode of the last rank, reduce_decode of the first, and so on."""
        from taco_jax import backend

        codec, g, jnp_codec = self.codec, self.geometry, dict(backend="jnp")
        wires, measure = backend.encode(codec, g, x, a, key, **jnp_codec)
        return {
            "encode": (wires, measure[0]),
            "reduce_encode": backend.reduce_encode(codec, g, wires, x, g.messages - 1, a, key, **jnp_codec),
            "reduce_decode": backend.reduce_decode(codec, g, wires, x, 0, a, **jnp_codec),
            "sum_decode": backend.sum_decode(codec, wires, g.per_message, x.dtype, a, **jnp_codec),
            "decode": backend.decode(codec, g, wires, x.dtype, a, **jnp_codec) if g.is_whole else None,
        }

    def run(self):
        import jax
        from pallas_kernels.triton import operations

        # These programs run once.
        fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        theirs = jax.jit(self.reference, compiler_options=fast)(self.x, self.exponent, self.key)
        fmt, g, x, a = self.fmt, self.geometry, self.x, self.exponent
        seed = self.codec.seed(self.key)
        wires = theirs["encode"][0]
        self.encoded("encode", operations.encode(fmt, g, x, a, seed), theirs)
        ours = operations.reduce_encode(fmt, g, wires, x, g.messages - 1, a, seed)
        self.encoded("reduce_encode", ours, theirs)
        self.near("reduce_decode", operations.reduce_decode(fmt, g, wires, x, 0, a), theirs, self.exact_sums)
        ours = operations.sum_decode(fmt, wires, g.per_message, x.dtype, a)
        self.near("sum_decode", ours, theirs, self.exact_sums)
        if g.is_whole:
            self.near("decode", operations.decode(fmt, g, wires, x.dtype, a), theirs, self.exact_decode)
        return self.errors

    def encoded(self, what, ours, theirs):
        wires, largest = theirs[what]
        self.same(what, ours[0], wires)
        self.same(f"{what}: largest", ours[1], np.where(np.isfinite(largest), largest, np.nan).reshape(()))

    def same(self, what, ours, theirs):
        ours, theirs = (np.atleast_1d(np.asarray(y)) for y in (ours, theirs))
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            self.errors.append(f"{what}: {ours.dtype}{ours.shape}, not {theirs.dtype}{theirs.shape}")
        elif ours.tobytes() != theirs.tobytes() and not np.array_equal(ours, theirs, equal_nan=ours.dtype != np.uint8):
            where = np.argwhere(ours != theirs)
            at = tuple(where[0])
            self.errors.append(f"{what}: {len(where)} differ, at {at}: {ours[at]} and {theirs[at]}")

    def near(self, what, ours, theirs, exact):
        theirs = theirs[what]
        if exact:
            return self.same(what, ours, theirs)
        ours, theirs = (np.asarray(y, np.float32) for y in (ours, theirs))
        finite = np.isfinite(theirs)
        if ours.shape != theirs.shape or (np.isfinite(ours) != finite).any():
            self.errors.append(f"{what}: other elements are finite")
        elif finite.any():
            # Of what is added up, the last bits; of the result, one rounding.
            eps = 2.0**-7 if str(self.x.dtype) == "bfloat16" else 2.0**-10 if str(self.x.dtype) == "float16" else 0
            error = np.abs(ours - theirs)[finite]
            bound = np.abs(theirs[finite]) * eps + np.abs(theirs[finite]).max() * 2.0**-18 + 1e-38
            if (error > bound).any():
                self.errors.append(f"{what}: off by up to {error.max()}")


def main():
    import jax
    import jax.numpy as jnp

    from pallas_kernels import Geometry
    from pallas_kernels.triton import launch, operations
    from taco_jax import backend
    from taco_jax.codec import CODECS, Codec

    repair_interpreter()
    launch.set_launcher(interpret)
    # Fewer programs than tiles.
    operations.multiprocessors = lambda: 1
    found = {}
    for case in CASES:
        name, dtype, n, messages, data = case
        codec = CODECS.get(name) or Codec("e3m2", 64, "hadamard", "e8m0")
        # The last message is shorter, the last but one as well where messages are short.
        size = messages * n - (messages > 1) * min(n // 2 + 1, 200)
        x = jnp.asarray(values(data, size, jnp.dtype(dtype)))
        found[_identity(case)] = Check(codec, Geometry(size, messages, n), x).run()
    for case in VARIANTS:
        element, block, rotation, scale, rounding, exponent, hardware_cast = case
        operations.has_hardware_cast = lambda yes=hardware_cast: yes
        x = jnp.asarray(values("nan" if block == 64 else "grid", 2 * 3 * block, jnp.float32))
        codec = Codec(element, block, rotation, scale, rounding)
        key = jax.random.key(1) if rounding == "stochastic" else None
        found[_identity(case)] = Check(codec, Geometry(x.size, 2, 3 * block), x, exponent, key).run()
    x = jnp.asarray(values("grid", 1000, jnp.float32))
    chunk = Geometry(1000, 3, 70, 130, 340)
    found["a chunk of every message"] = Check(CODECS["int6h"], chunk, x).run() + decodes_in_place(chunk, x)
    found["many ranks"] = Check(CODECS["mxfp8"], Geometry(1000, 12, 84), x).run()
    found["varying in shard_map"] = varies(x)
    print(json.dumps(found))


def decodes_in_place(geometry, x):
    """The chunk's elements are what decoding by itself gives, the others stay."""
    from pallas_kernels import Geometry
    from pallas_kernels.triton import operations
    from taco_jax import backend
    from taco_jax.codec import CODECS

    codec = CODECS["int6h"]
    fmt, g = backend.to_format(codec), geometry
    wires, _ = operations.encode(fmt, g, x)
    into = np.asarray(operations.decode_into(fmt, g, wires, x))
    alone = Geometry(g.messages * g.per_message, g.messages, g.per_message)
    rows = np.asarray(backend.decode(codec, alone, wires, x.dtype, backend="jnp")).reshape(g.messages, -1)
    expected = np.array(x)
    for p, row in enumerate(rows):
        start = g.offset + p * g.distance
        length = max(0, min(g.per_message, x.size - start))
        expected[start : start + length] = row[:length]
    return [] if np.array_equal(into, expected) else ["decode_into differs"]


def varies(x):
    """Outputs are typed varying over the axes that any input varies over, which a kernel's result is not by itself."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from pallas_kernels import Geometry
    from pallas_kernels.triton import launch, operations
    from taco_jax import backend
    from taco_jax.codec import CODECS

    fmt, geometry = backend.to_format(CODECS["taco"]), Geometry(x.size, 1, x.size)
    launch.set_launcher(lambda call: [jnp.zeros(y.shape, y.dtype) for y in call.outputs])
    types = []

    def body(x):
        wires, largest = operations.encode(fmt, geometry, x)
        wire, _ = operations.reduce_encode(fmt, geometry, wires, x, jax.lax.axis_index("tp"))
        y = operations.decode(fmt, geometry, wires, x.dtype)
        types.extend(jax.typeof(out).manual_axis_type.varying for out in (wires, largest, wire, y))
        return y

    mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")), x)
    return [f"output {i} varies over {set(t)}" for i, t in enumerate(types) if set(t) != {"tp"}]


if __name__ == "__main__":
    sys.exit(main())
