"""The Triton kernels in Triton's own interpreter, on the CPU, against the jnp codec: byte for byte.

Where values of a test are such that sums of a rotation are exact, in whatever order, bytes must be equal. Rotating back
a sum of several wires, or of float32 scales, is not exact: there the last bits may differ.

Triton decides when it is imported whether it interprets. So one process of its own, this file run as a program, runs
all cases that were selected, and the tests read what it found.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import cover, cover_groups
from helpers import REPOSITORY, run_python
from jax.sharding import PartitionSpec as P
from triton_checks import CODECS_WITH_KERNELS, DATA, Check, values

from pallas_kernels import Geometry
from pallas_kernels.triton import launch, operations
from taco_jax.codec import CODECS, UNCALIBRATED, Codec
from taco_jax.compression import dispatch

# (elements of a message, messages): of less than a block, of blocks and a part of one, of several tiles with a tail.
SHAPES = ((1, 1), (7, 3), (127, 1), (128, 2), (129, 4), (8193, 1))
DTYPES = ("bfloat16", "float16", "float32")
CASES = cover_groups(
    [("name",), ("shape",), ("dtype",), ("data",)],
    name=tuple(CODECS_WITH_KERNELS),
    dtype=DTYPES,
    shape=SHAPES,
    data=DATA,
)
# The fields that presets leave out.
FIELDS = dict(
    element=("e4m3", "e5m2", "int8", "int5", "e2m3", "e2m1"),
    block=(32, 64, 256),
    rotation=("hadamard", "signed_hadamard", "none"),
    scale=("float32", "bfloat16", "e8m0", "ue5m3", "site"),
    rounding=("nearest", "stochastic"),
    exponent=(None, -3, 5),
    capability=((8, 0), (8, 9), (9, 0), (10, 0)),
)


OTHERS = (
    "a chunk of every message",
    "what wires lose",
    "many ranks",
    "the largest floats",
    "varying in shard_map",
    "2^31 elements",
)


def _exists(variant) -> bool:
    """A site scale needs an element that has a code for NaN."""
    return variant[3] != "site" or variant[0] not in ("e2m3", "e2m1")


VARIANTS = cover_groups(
    [("element", "rounding"), ("block", "rotation"), ("scale", "rounding"), ("exponent",), ("capability",)], **FIELDS
)
# A site's scale with each exponent: it has no other.
VARIANTS = [*filter(_exists, VARIANTS), ("e4m3", 64, "hadamard", "site", "stochastic", -3, (9, 0))]
# All pairs of values, messages of several tiles among them, every night.
MORE_CASES = [
    (name, dtype, (n, messages), data)
    for name, dtype, n, messages, data in cover(
        2,
        name=tuple(CODECS_WITH_KERNELS),
        dtype=DTYPES,
        size=(1, 7, 127, 128, 129, 8191, 8193),
        messages=(1, 4),
        data=DATA,
    )
]
MORE_CASES = [case for case in MORE_CASES if case not in CASES]
MORE_VARIANTS = [v for v in cover(2, **FIELDS) if _exists(v) and v not in VARIANTS]


def _identity(case) -> str:
    return "-".join(map(str, case))


def _marked(cases, more) -> list:
    return [*cases, *(pytest.param(case, marks=pytest.mark.slow) for case in more)]


@pytest.fixture(scope="module")
def found(request):
    """A function of a case: the list of what differs. The first one that is asked for brings all that are slow like it,
    or all that are not, of those that this run of pytest has."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'triton>=3.6'")
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "support")))

    selected = [item.callspec.id for item in request.session.items if item.path == request.path]
    slow = set(map(_identity, [*MORE_CASES, *MORE_VARIANTS]))

    @functools.cache
    def run(are_slow: bool) -> dict:
        cases = [name for name in selected if (name in slow) == are_slow]
        environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
        process = run_python([__file__, json.dumps(cases)], devices=1, env=environment, timeout=550)
        return json.loads(process.stdout.splitlines()[-1])

    def found_of(case):
        name = case if isinstance(case, str) else _identity(case)
        return run(name in slow)[name]

    return found_of


@pytest.mark.parametrize("case", _marked(CASES, MORE_CASES), ids=_identity)
def test_presets_equal_the_jnp_codec(found, case):
    assert found(case) == []


@pytest.mark.parametrize("case", _marked(VARIANTS, MORE_VARIANTS), ids=_identity)
def test_other_codecs_equal_the_jnp_codec(found, case):
    assert found(case) == []


@pytest.mark.parametrize("name", OTHERS)
def test_also(found, name):
    assert found(name) == []


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
    what 2.5 no longer does, and patches its language anew for each call of a function, which is slow. So is to compute
    which sums of integers overflow, whose result it reads only when it debugs."""
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
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def interpret(call):
    """A launcher: runs a kernel in the interpreter."""
    from pallas_kernels.triton import kernels

    arrays = [np.array(x) for x in call.arrays]
    # What a kernel does not write is seen, but for arrays that it writes in place.
    outputs = [np.full(y.shape, 77).astype(y.dtype) for y in call.outputs]
    for source, target in call.aliases.items():
        outputs[target] = arrays[source]
    getattr(kernels, call.kernel)[call.grid](*map(Pointer, arrays), *call.sizes, *map(Pointer, outputs), R=call.recipe)
    return [jnp.asarray(y) for y in outputs]


def main(cases: str):
    """cases: their names, as JSON."""
    names = set(json.loads(cases))
    repair_interpreter()
    launch.set_launcher(interpret)
    # Fewer programs than tiles.
    operations.multiprocessors = lambda: 1
    found = {}
    for case in (case for case in [*CASES, *MORE_CASES] if _identity(case) in names):
        name, dtype, (n, messages), data = case
        # The last message is shorter, and where messages are short the one before it is as well.
        size = messages * n - (messages > 1) * min(n // 2 + 1, 200)
        geometry = Geometry(size, messages, n)
        found[_identity(case)] = Check(CODECS_WITH_KERNELS[name], geometry, values(data, size, dtype)).run()
    for case in (case for case in [*VARIANTS, *MORE_VARIANTS] if _identity(case) in names):
        element, block, rotation, scale, rounding, exponent, capability = case
        operations.capability = lambda found=capability: found
        x = values("nan" if block == 64 else "grid", 2 * 3 * block, "float32")
        codec = Codec(element, block, rotation, scale, rounding)
        key = jax.random.key(1) if rounding == "stochastic" else None
        found[_identity(case)] = Check(codec, Geometry(x.size, 2, 3 * block), x, exponent, key).run()
    if names.intersection(OTHERS):
        found |= others()
    print(json.dumps(found))


def others() -> dict[str, list[str]]:
    """By name: what is no case of a table."""
    operations.capability = lambda: (9, 0)
    found, x = {}, values("grid", 1000, "float32")
    chunk = Geometry(1000, 3, 70, 130, 340)
    found["a chunk of every message"] = Check(CODECS["int6h"], chunk, x).run() + decodes_in_place(chunk, x)
    found["what wires lose"] = residuals(chunk, x)
    found["many ranks"] = Check(CODECS["mxfp8"], Geometry(1000, 12, 84), x).run()
    largest = np.where(np.arange(x.size) % 50 == 0, np.float32(3.4e38), x)
    found["the largest floats"] = Check(CODECS["mxint8"], Geometry(1000, 1, 1000), largest).run()
    found["2^31 elements"] = [error for n in (2**31 - 8, 2**31, 2**31 + 8) for error in counts_to(n, x)]
    found["varying in shard_map"] = varies(jnp.asarray(x))
    return found


def decodes_in_place(geometry, x):
    """The chunk's elements are what decoding by itself gives, the others stay."""
    codec = CODECS["int6h"]
    fmt, g = dispatch.to_format(codec), geometry
    wires, _ = operations.encode(fmt, g, x)
    into = np.asarray(operations.decode_into(fmt, g, wires, x))
    alone = Geometry(g.messages * g.per_message, g.messages, g.per_message)
    rows = np.asarray(dispatch.decode(codec, alone, wires, x.dtype, backend="jnp")).reshape(g.messages, -1)
    expected = np.array(x)
    for p, row in enumerate(rows):
        start = g.offset + p * g.distance
        length = max(0, min(g.per_message, x.size - start))
        expected[start : start + length] = row[:length]
    return [] if np.array_equal(into, expected) else ["decode_into differs"]


def residuals(chunk, x):
    """Residuals are x less what `decode` reads from the wires, bit for bit, and the wires are those of `encode`."""
    errors = []
    for codec, geometry, dtype, exponent in (
        (CODECS["int4h"], Geometry(1000, 3, 384), "bfloat16", None),
        (CODECS["taco"], chunk, "float16", -3),
        (CODECS["mxfp4"], Geometry(1000, 1, 1000), "bfloat16", None),
        (Codec("e4m3", 64, "signed_hadamard", "site"), Geometry(1000, 2, 512), "bfloat16", UNCALIBRATED),
    ):
        values = np.where(np.arange(x.size) == 300, np.float32(np.nan), x / 3).astype(jnp.dtype(dtype))
        fmt, n, p = dispatch.to_format(codec), geometry.per_message, geometry.messages
        given = fmt, geometry, values, exponent
        (wires, largest), (*same, error) = operations.encode(*given), operations.encode_with_residual(*given)
        equal = np.array_equal(same[0], wires) and np.array_equal(same[1], largest, equal_nan=True)
        errors += [f"{codec.name}: other wires"] * (not equal)
        decoded = operations.decode(fmt, Geometry(p * n, p, n), wires, values.dtype, exponent)
        padded = np.pad(values, (0, geometry.messages * geometry.distance - values.size)).reshape(p, -1)
        pieces = padded[:, geometry.offset : geometry.offset + n].reshape(-1)
        lost = (pieces.astype(np.float32) - np.asarray(decoded, np.float32)).astype(values.dtype)
        lost = lost[: values.size] if geometry.is_whole else lost
        same = np.array_equal(error.astype(np.float32), lost.astype(np.float32), equal_nan=True)
        errors += [f"{codec.name}: other residuals"] * (not same)
    return errors


def counts_to(n, x):
    """The codes of the first of n elements, of which only x is there: what kernels make of such a number."""
    fmt, geometry = dispatch.to_format(CODECS["mxint8"]), Geometry(x.size, 1, x.size)
    expected = operations.encode(fmt, geometry, x)[0]
    launch.set_launcher(lambda call: interpret(dataclasses.replace(call, sizes=(-n, *call.sizes[1:]))))
    wires = operations.encode(fmt, geometry, x)[0]
    launch.set_launcher(interpret)
    return [] if np.array_equal(wires, expected) else [f"{n} elements: other codes"]


def varies(x):
    """Outputs are typed varying over the axes that any input varies over, which a kernel's result is not by itself."""
    fmt, geometry = dispatch.to_format(CODECS["taco"]), Geometry(x.size, 1, x.size)
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
    sys.exit(main(*sys.argv[1:]))
