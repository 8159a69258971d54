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
from mosaic_checks import (
    EXPONENTS,
    KINDS,
    SIZES,
    arguments,
    check_values,
    check_wide_sum,
    check_wires,
    reference,
    shares,
    values,
)
from mosaic_programs import DTYPES, OPERATIONS, PRESETS
from pairs import pairwise

from pallas_kernels import Geometry, compat, formats, mosaic
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

# Fields of codecs; a site scale comes with a calibrated exponent, and ue5m3 with or without one.
FIELDS = dict(
    element=tuple(formats.ELEMENTS),
    block=(128, 32, 64, 256),
    rotation=("hadamard", "none", "signed_hadamard"),
    scale=("ue5m3", "bfloat16", "e8m0", "float32", "site"),
    rounding=("nearest", "stochastic"),
    dtype=DTYPES,
    operation=OPERATIONS,
)
# All elements that a preset has.
FEW_FIELDS = FIELDS | dict(element=tuple(name for name in formats.ELEMENTS if name != "e3m2"))
SHAPES = dict(
    size=SIZES, ranks=(2, 1, 4), operation=OPERATIONS, name=PRESETS, dtype=DTYPES, kind=("mixed", *KINDS),
    rounding=("nearest", "stochastic"),
)  # fmt: skip
# A message that is padded, one with a tail that is no row, and one of several tiles with a tail of three elements.
FEW_SHAPES = SHAPES | dict(
    size=(129, 8193, 2**14 + 3), name=("taco", "int6h", "mxfp4"), kind=("mixed", "inf", "nan", "zero")
)


@pytest.fixture(autouse=True)
def interpreter(request):
    """A failure inside of the interpreter leaves state behind that would fail the next test too."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        compat.reset_interpreter()


def compare(codec, geometry, dtype, operation, x, exponent=None, rank=0, interpret=None):
    """Runs an operation twice, interpreted and with jnp; both read the wires that jnp wrote. Returns the kernel's."""
    key = jax.random.key(1) if codec.rounding == "stochastic" else None
    theirs, wires = reference(codec, geometry, dtype, operation, x, exponent, key, rank)
    ours = kernel(codec, geometry, dtype, operation, x, wires, exponent, key, rank, interpret)
    if "encode" in operation:
        check_wires(codec, geometry.per_message, operation, ours, theirs, exact=True)
    else:
        check_values(ours, theirs, codec.block)
    return ours


def kernel(codec, geometry, dtype, operation, x, wires, exponent, key, rank, interpret=None):
    fmt = backend.to_format(codec, encodes="encode" in operation)
    interpret = compat.interpret_params() if interpret is None else interpret

    @jax.jit
    def run(x, wires, exponent, rank):
        given = arguments(geometry, dtype, operation, x, wires, exponent, codec.seed(key), rank)
        return getattr(mosaic, operation)(fmt, *given, interpret=interpret)

    return run(x, wires, exponent, rank)


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
    # Of four messages the second is the owner's: there are wires before it and after it.
    compare(CODECS[name], geometry, "bfloat16", operation, x, rank=1)


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


@pytest.mark.parametrize("name,dtype,cut", [("taco", "bfloat16", "ends in the tail"), ("mxfp4", "float16", "aligned")])
def test_a_sum_may_be_wider_than_its_terms(name, dtype, cut):
    check_wide_sum(CODECS[name], Geometry(*CHUNKS[cut]), dtype, interpret=compat.interpret_params())
