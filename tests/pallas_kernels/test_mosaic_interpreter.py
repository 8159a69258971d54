"""Mosaic kernels, emulated on the CPU, against the jnp codec: the bytes they write and the values they read.

The interpreter emulates a GPU's memories, copies and barriers. It takes about a second for a kernel of any size, so a
pairwise cover of few values runs by default; a cover of all values and the full product are `slow`.

Every array holds several kinds of blocks: ordinary ones, zeros, an Inf, a NaN, huge and tiny values.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from pairs import pairwise

from pallas_kernels import Geometry, compat, mosaic
from taco_jax import CODECS, UNCALIBRATED, Codec, backend
from taco_jax.elements import ELEMENTS

pytestmark = [
    pytest.mark.skipif(
        not hasattr(plgpu, "InterpretGPUParams"),
        reason=f"the Mosaic GPU interpreter of jax {jax.__version__} knows no register layouts: jax 0.11 and newer do",
    ),
    # Of the products with an Inf that the interpreter does in numpy.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

OPERATIONS = ("encode", "reduce_encode", "reduce_decode", "sum_decode", "decode")
DTYPES = ("bfloat16", "float16", "float32")
SIZES = (1, 7, 127, 128, 129, 8191, 8193, 2**14 + 3)
KINDS = ("gaussian", "zero", "inf", "nan", "huge", "tiny")
PRESETS = [name for name, codec in CODECS.items() if not codec.exact and codec.scale != "paper"]
# Fields of codecs; a site scale comes with a calibrated exponent, and ue5m3 with or without one.
FIELDS = dict(
    element=tuple(ELEMENTS),
    block=(128, 32, 64, 256),
    rotation=("hadamard", "none", "signed_hadamard"),
    scale=("ue5m3", "bfloat16", "e8m0", "float32", "site"),
    rounding=("nearest", "stochastic"),
    dtype=DTYPES,
    operation=OPERATIONS,
)
# All elements that a preset has.
FEW_FIELDS = FIELDS | dict(element=tuple(name for name in ELEMENTS if name != "e3m2"))
SHAPES = dict(
    size=SIZES, ranks=(2, 1, 4), operation=OPERATIONS, name=PRESETS, dtype=DTYPES, kind=("mixed", *KINDS),
    rounding=("nearest", "stochastic"),
)  # fmt: skip
# A message that is padded, one with a tail that is no row, and one of several tiles with a tail of three elements.
FEW_SHAPES = SHAPES | dict(
    size=(129, 8193, 2**14 + 3), name=("taco", "int6h", "mxfp4"), kind=("mixed", "inf", "nan", "zero")
)
EXPONENTS = {"ue5m3": -4, "site": -2}


@pytest.fixture(autouse=True)
def interpreter(request):
    """A failure inside of the interpreter leaves state behind that would fail the next test too."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        compat.reset_interpreter()


def values(size: int, kind: str, block: int, dtype: str, seed: int = 0) -> jax.Array:
    """dtype[size] of one kind, or of blocks of all kinds in turn."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size).astype(np.float32)
    n_blocks = -(-size // block)
    for b in range(n_blocks):
        which = KINDS[b % len(KINDS)] if kind == "mixed" else kind
        part = x[b * block : (b + 1) * block]
        if which in ("inf", "nan"):
            # One in every message would leave nothing to compare: one in every few blocks.
            if kind == "mixed" or b % 3 == 0:
                part[rng.integers(part.size)] = np.inf if which == "inf" else np.nan
        else:
            part *= {"gaussian": 1.0, "zero": 0.0, "huge": 1e30, "tiny": 1e-30}[which]
    with np.errstate(over="ignore"):
        return jnp.asarray(x).astype(dtype)


def shares(codec: Codec, size: int, ranks: int) -> Geometry:
    """How a collective cuts x: shares of whole blocks, or the whole array."""
    if ranks == 1:
        return Geometry(size, 1, size)
    return Geometry(size, ranks, codec.block * -(-codec.n_blocks(size) // ranks))


def compare(codec, geometry, dtype, operation, x, exponent=None, rank=0, interpret=None):
    """Runs an operation twice, interpreted and with jnp; both read the wires that jnp wrote. Returns the kernel's."""
    key = jax.random.key(1) if codec.rounding == "stochastic" else None
    exponent = None if exponent is None else jnp.int32(exponent)
    theirs, wires = reference(codec, geometry, dtype, operation, x, exponent, key, rank)
    ours = kernel(codec, geometry, dtype, operation, x, wires, exponent, key, rank, interpret)
    if "encode" in operation:
        check_wires(codec, operation, ours, theirs)
    else:
        check_values(ours, theirs, codec.block)
    return ours


def arguments(geometry, dtype, operation, x, wires, exponent, random, rank):
    """In the order of the kernels' interface, which jnp's differs from only in the last: a key, not its seed."""
    x, rank, n = [x], [jnp.int32(rank)], geometry.per_message
    return {
        "encode": [geometry, *x, exponent, random],
        "reduce_encode": [geometry, wires, *x, *rank, exponent, random],
        "reduce_decode": [geometry, wires, *x, *rank, exponent],
        "sum_decode": [wires, n, dtype, exponent],
        "decode": [geometry, wires, dtype, exponent],
    }[operation]


def reference(codec, geometry, dtype, operation, x, exponent, key, rank):
    @jax.jit
    def run(x, exponent):
        first = wires, _ = backend.encode(codec, geometry, x, exponent, key, backend="jnp")
        if operation == "encode":
            return first, wires
        given = arguments(geometry, dtype, operation, x, wires, exponent, key, rank)
        return getattr(backend, operation)(codec, *given, backend="jnp"), wires

    return run(x, exponent)


def kernel(codec, geometry, dtype, operation, x, wires, exponent, key, rank, interpret=None):
    fmt = backend.to_format(codec, encodes="encode" in operation)
    interpret = compat.interpret_params() if interpret is None else interpret

    @jax.jit
    def run(x, wires, exponent, rank):
        given = arguments(geometry, dtype, operation, x, wires, exponent, codec.seed(key), rank)
        return getattr(mosaic, operation)(fmt, *given, interpret=interpret)

    return run(x, wires, exponent, rank)


def check_wires(codec, operation, ours, theirs):
    (wires, largest), (wanted, measure) = ours, theirs
    assert wires.shape == wanted.shape and wires.dtype == jnp.uint8
    wires, wanted = np.asarray(wires), np.asarray(wanted)
    different = int((wires != wanted).sum())
    # A rotation sums in another order, and a sum of wires may round once less (a fused multiply-add): then a value that
    # lies on a rounding border may fall on its other side. Else there is nothing to differ.
    exact = operation == "encode" and codec.rotation == "none"
    assert different <= (0 if exact else max(1, 2e-4 * wanted.size)), different
    largest, wanted = float(largest), float(measure[0])
    if np.isfinite(wanted):
        np.testing.assert_allclose(largest, wanted, rtol=1e-6)
    else:
        assert not np.isfinite(largest)


def check_values(ours, theirs, block):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    digits = jnp.finfo(ours.dtype).nmant
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    # The own chunk's Inf comes back from jnp's rotations in its own place, among NaN; kernels have NaN there as well.
    np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
    assert np.isnan(a[np.isnan(b)]).all()
    same = (a == b) | ~np.isfinite(b)
    # What differs does so in the last bit, or in what the cancellation of sums leaves of a block's largest: sums in
    # float32, of values that are exact to 2^-17 where the result has 16 bits.
    sums = 2.0**-18 if digits > 20 else 2.0**-15
    padded = np.pad(np.where(np.isfinite(b), np.abs(b), 0), (0, -b.size % block)).reshape(-1, block)
    largest = np.repeat(padded.max(1), block)[: b.size]
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(a - b) - 2.0**-digits * np.abs(b))
    assert (error <= sums * largest).all(), error.max()
    if digits < 20 and a.size >= 1000:
        assert (~same).mean() < 0.05


def codec_of(element, block, rotation, scale, rounding) -> Codec:
    """The codec of the fields, or its nearest neighbour that exists and has a kernel."""
    if scale == "site" and ELEMENTS[element].nan is None:
        scale = "e8m0"
    if element == "int5" and block == 32:
        block = 64
    return Codec(element, block, rotation, scale, rounding)


def run_fields(element, block, rotation, scale, rounding, dtype, operation):
    codec = codec_of(element, block, rotation, scale, rounding)
    if mosaic.obstacle(backend.to_format(codec), operation.partition("_")[0].replace("sum", "reduce"), dtype):
        codec = dataclasses.replace(codec, block=128)
    # A tile of 64 rows and a part of one, for each of two ranks.
    geometry = Geometry(2 * 72 * 256, 2, 72 * 256)
    x = values(geometry.elements, "mixed", codec.block, dtype)
    exponent = EXPONENTS.get(codec.scale) if rounding == "nearest" or codec.scale == "site" else UNCALIBRATED
    compare(codec, geometry, dtype, operation, x, exponent, rank=1)


def run_shape(size, ranks, operation, name, dtype, kind, rounding):
    codec = dataclasses.replace(CODECS[name], rounding=rounding)
    ranks = max(ranks, 2) if operation.startswith("reduce") else ranks
    x = values(size, kind, codec.block, dtype)
    exponent = EXPONENTS.get(codec.scale) if size % 2 else None
    compare(codec, shares(codec, size, ranks), dtype, operation, x, exponent, rank=ranks - 1)


def named(case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", pairwise(**FEW_FIELDS), ids=named)
def test_fields(case):
    run_fields(*case)


@pytest.mark.parametrize("case", pairwise(**FEW_SHAPES), ids=named)
def test_shapes(case):
    run_shape(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(**FIELDS), ids=named)
def test_more_fields(case):
    run_fields(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(**SHAPES), ids=named)
def test_more_shapes(case):
    run_shape(*case)


@pytest.mark.slow
@pytest.mark.parametrize("scale", FIELDS["scale"])
@pytest.mark.parametrize("element", FIELDS["element"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_field(element, scale, operation):
    for rest in itertools.product(FIELDS["block"], FIELDS["rotation"], FIELDS["rounding"], DTYPES):
        run_fields(element, *rest[:2], scale, *rest[2:], operation)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_shape(size, name, operation):
    for rest in itertools.product(DTYPES, SHAPES["kind"], SHAPES["rounding"]):
        for ranks in SHAPES["ranks"]:
            run_shape(size, ranks, operation, name, *rest)


# What is not a product of values


@pytest.mark.parametrize("name", ["taco", *(pytest.param(n, marks=pytest.mark.slow) for n in ("int5h", "mxfp6"))])
def test_wires_are_interchangeable(name):
    # An all-reduce of two ranks, one with kernels and one with jnp: each reads what the other wrote, and they agree.
    codec, exponent, dtype = CODECS[name], jnp.int32(-3), "bfloat16"
    geometry = Geometry(2 * 72 * 128, 2, 72 * 128)
    x, x_jnp = (values(geometry.elements, "gaussian", 128, dtype, seed) for seed in range(2))
    options = {"backend": "jnp"}

    def kernels(operation, wires):
        return kernel(codec, geometry, dtype, operation, x, wires, exponent, None, 0)

    @jax.jit
    def jnp_reduces(wires):
        return backend.reduce_encode(codec, geometry, wires, x_jnp, 1, exponent, **options)[0]

    ours = kernels("encode", None)[0]
    theirs = jax.jit(lambda x: backend.encode(codec, geometry, x, exponent, **options)[0])(x_jnp)
    gathered = jnp.stack(
        [
            kernels("reduce_encode", jnp.stack([ours[0], theirs[0]]))[0],
            jnp_reduces(jnp.stack([ours[1], theirs[1]])),
        ]
    )
    y = kernels("decode", gathered)
    y_jnp = jax.jit(lambda wires: backend.decode(codec, geometry, wires, dtype, exponent, **options))(gathered)
    check_values(y, y_jnp, codec.block)
    exact = np.asarray(x, np.float32) + np.asarray(x_jnp, np.float32)
    assert np.linalg.norm(np.asarray(y, np.float32) - exact) < 0.08 * np.linalg.norm(exact)


# (whole x, messages, elements of each, where the first starts, from one to the next); the last two are copied first.
CHUNKS = {
    "aligned": (4 * 16384, 4, 8192, 8192, 16384),
    "ends in the tail": (2 * 16384 - 5, 2, 8192, 8192, 16384),
    "beyond x": (3 * 16384 - 9000, 4, 8192, 8192, 16384),
    "short": (4 * 1024, 4, 256, 512, 1024),
    "not at a row": (2 * 16384, 2, 8192, 32, 16384),
}


CHUNK_CASES = list(itertools.product(CHUNKS, ("encode", "reduce_encode", "reduce_decode")))


@pytest.mark.parametrize(
    "cut,operation", [c if i % 2 else pytest.param(*c, marks=pytest.mark.slow) for i, c in enumerate(CHUNK_CASES)]
)
def test_chunks(cut, operation):
    name = "mxfp6" if cut == "not at a row" else "int6h"
    geometry = Geometry(*CHUNKS[cut])
    x = values(geometry.elements, "mixed", CODECS[name].block, "bfloat16")
    compare(CODECS[name], geometry, "bfloat16", operation, x, rank=geometry.messages - 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_races(operation):
    codec, geometry = CODECS["int6h"], Geometry(2 * 3 * 8192, 2, 3 * 8192)
    x = values(geometry.elements, "gaussian", codec.block, "bfloat16")
    compare(codec, geometry, "bfloat16", operation, x, interpret=compat.interpret_params(detect_races=True))


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_races_of_warpgroups(operation):
    # From 133 tiles on a multiprocessor has two warpgroups, which share the matrices of the rotation.
    codec, geometry = CODECS["int6h"], Geometry(2 * 140 * 8192, 2, 140 * 8192)
    x = values(geometry.elements, "gaussian", codec.block, "bfloat16")
    compare(codec, geometry, "bfloat16", operation, x, interpret=compat.interpret_params(detect_races=True))


def test_warpgroups_that_share_memory():
    codec, geometry = CODECS["int6h"], Geometry(140 * 8192, 1, 140 * 8192)
    x = values(geometry.elements, "gaussian", codec.block, "bfloat16")
    compare(codec, geometry, "bfloat16", "encode", x)


def test_the_interpreter_can_be_reset():
    codec, geometry = CODECS["int6h"], Geometry(8192, 1, 8192)
    x = values(geometry.elements, "gaussian", codec.block, "bfloat16")
    with pytest.raises(Exception):  # noqa: B017
        # The wire of a shorter message.
        kernel(codec, geometry, "bfloat16", "decode", x, jnp.zeros((1, 1024), jnp.uint8), None, None, 0)
    compat.reset_interpreter()
    compare(codec, geometry, "bfloat16", "encode", x)
