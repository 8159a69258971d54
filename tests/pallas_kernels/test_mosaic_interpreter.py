"""Mosaic kernels, emulated on the CPU, against the jnp codec: the bytes they write and the values they read.

The interpreter emulates a GPU's memories, copies and barriers. It takes two seconds to compile a kernel of any size, so
by default few kernels run, in which what meets in a kernel's code meets (`WRITES`, `READS`); three-wise covers of all
values are `slow`. `test_mosaic_gpu.py` compares more on a GPU.

Every array holds several kinds of blocks: ordinary ones, zeros, an Inf, a NaN, huge and tiny values.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import cover, cover_groups
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
from mosaic_programs import DTYPES, OPERATIONS, PRESETS, ROTATED, with_signs

from pallas_kernels import Geometry, compat, formats, mosaic
from pallas_kernels.formats import ELEMENTS
from pallas_kernels.mosaic import pipeline
from taco_jax import CODECS, UNCALIBRATED, Codec
from taco_jax.compression import dispatch

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
    element=formats.KERNEL_ELEMENTS,
    block=(128, 32, 64, 256),
    rotation=("hadamard", "none", "signed_hadamard"),
    scale=("ue5m3", "bfloat16", "e8m0", "float32", "site"),
    rounding=("nearest", "stochastic"),
    dtype=DTYPES,
    operation=OPERATIONS,
)
SHAPES = dict(
    size=SIZES, ranks=(2, 1, 4), operation=OPERATIONS, name=PRESETS, dtype=DTYPES, rounding=("nearest", "stochastic"),
)  # fmt: skip
# (whole x, messages, elements of each, where the first starts, from one to the next); the last two are copied first.
CHUNKS = {
    "aligned": (4 * 16384, 4, 8192, 8192, 16384),
    "ends in the tail": (2 * 16384 - 5, 2, 8192, 8192, 16384),
    "beyond x": (3 * 16384 - 9000, 4, 8192, 8192, 16384),
    "short": (4 * 1024, 4, 256, 512, 1024),
    "not at a row": (2 * 16384, 2, 8192, 32, 16384),
}
# A tile of 64 rows and a part of one for each of two ranks, a message that is padded, one with a tail that is no row,
# several tiles with a tail of three elements, and a chunk of every message.
GEOMETRIES = ("tile and a part", (129, 2), (8193, 4), (2**14 + 3, 2), "ends in the tail", "beyond x", "short")
FEW = FIELDS | dict(geometry=GEOMETRIES) | ROTATED
# All elements that a preset has.
FEW["element"] = tuple(name for name in formats.KERNEL_ELEMENTS if name != "e3m2")
# Kernels that encode. `reduce_encode` reads wires as well.
WRITES = with_signs(
    cover_groups(
        [
            *itertools.product(("operation",), ("scale", "dtype", "block", "rounding")),
            *itertools.product(("rotation",), ("block", "dtype", "signs", "operation")),
            ("rounding", "rotation"),
            ("element",),
            ("geometry",),
        ],
        **(FEW | dict(operation=("encode", "reduce_encode"))),
    )
)
# Kernels that only decode.
READS = with_signs(
    cover_groups(
        [
            *itertools.product(("operation",), ("dtype", "rotation")),
            *itertools.product(("rotation",), ("block", "dtype", "signs")),
            ("element",),
            ("geometry",),
            ("scale",),
        ],
        **(FEW | dict(operation=("reduce_decode", "sum_decode", "decode"), rounding=("nearest",))),
    )
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
    interpret = compat.interpret_params() if interpret is None else interpret
    return program(codec, geometry, dtype, operation, interpret)(x, wires, exponent, codec.seed(key), rank)


@functools.lru_cache(maxsize=1)
def program(codec, geometry, dtype, operation, interpret):
    """jit of an operation; values of several kinds take the same."""
    fmt = dispatch.to_format(codec, encodes="encode" in operation)

    @jax.jit
    def run(x, wires, exponent, seed, rank):
        given = arguments(geometry, dtype, operation, x, wires, exponent, seed, rank)
        return getattr(mosaic, operation)(fmt, *given, interpret=interpret)

    return run


def codec_of(element, block, rotation, scale, rounding) -> Codec:
    """The codec of the fields, or its nearest neighbour that exists and has a kernel."""
    if scale == "site" and ELEMENTS[element].nan is None:
        scale = "e8m0"
    if element == "int5" and block == 32:
        block = 64
    return Codec(element, block, rotation, scale, rounding)


def run_fields(element, block, rotation, scale, rounding, dtype, operation, geometry="tile and a part"):
    codec = codec_of(element, block, rotation, scale, rounding)
    if mosaic.why_unsupported(dispatch.to_format(codec), operation.partition("_")[0].replace("sum", "reduce"), dtype):
        codec = dataclasses.replace(codec, block=128)
    if geometry == "tile and a part":
        geometry = Geometry(2 * 72 * 256, 2, 72 * 256)
    elif isinstance(geometry, str):
        geometry = chunk(geometry, operation, codec.block)
    else:
        geometry = shares(codec, *geometry)
    x = values(geometry.elements, "mixed", codec.block, dtype)
    exponent = EXPONENTS.get(codec.scale) if rounding == "nearest" or codec.scale == "site" else UNCALIBRATED
    compare(
        codec, geometry, dtype, operation, x, exponent, rank=geometry.messages // 2
    )  # not the last of three and more


def chunk(cut, operation, block) -> Geometry:
    """The chunk of this name; what decodes takes whole arrays, and messages consist of whole blocks."""
    elements, messages, n, offset, distance = CHUNKS[cut]
    if operation in ("sum_decode", "decode"):
        return Geometry(min(elements, messages * n), messages, n)
    assert n % block == offset % block == 0, (cut, block)
    return Geometry(elements, messages, n, offset, distance)


def run_shape(size, ranks, operation, name, dtype, rounding):
    codec = dataclasses.replace(CODECS[name], rounding=rounding)
    ranks = max(ranks, 2) if operation.startswith("reduce") else ranks
    for kind in ("mixed", *KINDS):
        x = values(size, kind, codec.block, dtype)
        exponent = EXPONENTS.get(codec.scale) if size % 2 else None
        compare(codec, shares(codec, size, ranks), dtype, operation, x, exponent, rank=ranks - 1)


def named(case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", WRITES, ids=named)
def test_kernels_that_encode(case):
    run_fields(*case)


@pytest.mark.parametrize("case", READS, ids=named)
def test_kernels_that_only_decode(case):
    run_fields(*case)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("element", FIELDS["element"])
def test_more_fields(element, operation):
    for case in cover(3, **FIELDS):
        if case[0] == element and case[-1] == operation:
            run_fields(*case)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_more_shapes(name, operation):
    for case in cover(3, **SHAPES):
        if case[2:4] == (operation, name):
            run_shape(*case)


# What is not a product of values


# Bytes that equal jnp's, and reading what jnp wrote, is what every case above asserts.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["taco", "int5h", "mxfp6"])
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
        return dispatch.reduce_encode(codec, geometry, wires, x_jnp, 1, exponent, **options)[0]

    ours = kernels("encode", None)[0]
    theirs = jax.jit(lambda x: dispatch.encode(codec, geometry, x, exponent, **options)[0])(x_jnp)
    gathered = jnp.stack(
        [
            kernels("reduce_encode", jnp.stack([ours[0], theirs[0]]))[0],
            jnp_reduces(jnp.stack([ours[1], theirs[1]])),
        ]
    )
    y = kernels("decode", gathered)
    y_jnp = jax.jit(lambda wires: dispatch.decode(codec, geometry, wires, dtype, exponent, **options))(gathered)
    check_values(y, y_jnp, codec.block)
    exact = np.asarray(x, np.float32) + np.asarray(x_jnp, np.float32)
    assert np.linalg.norm(np.asarray(y, np.float32) - exact) < 0.08 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize("operation", ("encode", "reduce_encode", "reduce_decode"))
@pytest.mark.parametrize("cut", CHUNKS)
def test_chunks(cut, operation):
    name = "mxfp6" if cut == "not at a row" else "int6h"
    geometry = Geometry(*CHUNKS[cut])
    x = values(geometry.elements, "mixed", CODECS[name].block, "bfloat16")
    # Of four messages the second is the owner's: there are wires before it and after it.
    compare(CODECS[name], geometry, "bfloat16", operation, x, rank=1)


def test_wires_that_lie_apart_are_summed_as_side_by_side():
    # Scales of float32: a product and a sum of two may round once, so that the order of terms shows.
    codec, n = dataclasses.replace(CODECS["int8h"], scale="float32"), 3 * 8192
    fmt, geometry = dispatch.to_format(codec), Geometry(2 * n, 2, n)
    wanted, wires = reference(codec, geometry, "bfloat16", "sum_decode", values(2 * n, "gaussian", 128, "bfloat16"))

    @jax.jit
    def run(own, received, rank):
        arguments = fmt, own, received, rank, n, "bfloat16"
        return mosaic.sum_decode_apart(*arguments, interpret=compat.interpret_params())

    found = [np.asarray(run(wires[rank], wires[1 - rank], jnp.int32(rank))) for rank in range(2)]
    np.testing.assert_array_equal(*found)
    check_values(found[0], wanted, codec.block)


@pytest.fixture
def two_ctas(monkeypatch):
    """A few tiles give each of two CTAs two warpgroups, which share the rotation's matrices, and several tiles each."""
    monkeypatch.setattr(pipeline, "MAX_CTAS", 2)


# The first reads as other sums do and writes as the encoder does, and the second writes as other sums do.
@pytest.mark.parametrize(
    "operation",
    [
        pytest.param("reduce_encode", marks=pytest.mark.slow),
        "decode",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("encode", "reduce_decode", "sum_decode")),
    ],
)
def test_races(operation, two_ctas):
    codec, geometry = CODECS["int8h"], Geometry(2 * 3 * 8192, 2, 3 * 8192)
    x = values(geometry.elements, "gaussian", codec.block, "bfloat16")
    compare(codec, geometry, "bfloat16", operation, x, interpret=compat.interpret_params(detect_races=True))


def test_warpgroups_that_share_memory(two_ctas):
    codec, geometry = CODECS["int6h"], Geometry(7 * 8192, 1, 7 * 8192)
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


@pytest.mark.parametrize(
    "name,dtype,cut",
    [
        ("taco", "bfloat16", "ends in the tail"),
        pytest.param("mxfp4", "float16", "aligned", marks=pytest.mark.slow),
    ],
)
def test_a_sum_may_be_wider_than_its_terms(name, dtype, cut):
    check_wide_sum(CODECS[name], Geometry(*CHUNKS[cut]), dtype, interpret=compat.interpret_params())
