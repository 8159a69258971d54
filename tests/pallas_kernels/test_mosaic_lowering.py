"""Mosaic kernels lower for CUDA on a machine without a GPU: alone, in `shard_map`, and inside of a gradient.

Lowering builds each kernel's program, its register layouts and copies, which is where an operation that Mosaic does not
know fails. That takes half a second for each, most of it in Python: by default few kernels are lowered, in which what
meets in a kernel's code meets. Compiling them needs the CUDA plugin: `tests/aot`.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from covers import cover, cover_groups
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from mosaic_programs import (
    DTYPES,
    FIELDS,
    OPERATIONS,
    PRESETS,
    ROTATED,
    WIDE,
    operation_program,
    why_unsupported,
    with_signs,
)
from spelled_out import every_size

import taco_jax
from pallas_kernels import Format
from pallas_kernels.formats import KERNEL_ELEMENTS
from taco_jax import CODECS
from taco_jax.compression.dispatch import to_format

# Elements of a message (several tiles; with a tail that is no row; too short for the tiles) and messages.
SHAPES = ((3 * 8192, 4), (8192 + 37, 1), (129, 2))
ROUNDINGS = ("nearest", "stochastic")
PRESET_CASES = dict(name=PRESETS, operation=OPERATIONS, dtype=DTYPES, shape=SHAPES, rounding=ROUNDINGS)
FEW = FIELDS | dict(shape=((2 * 64 * 256, 4), *SHAPES), rounding=ROUNDINGS) | ROTATED
# Kernels that encode; `reduce_encode` reads wires as well. Casts and packing go by element, block, rotation and dtype.
WRITES = with_signs(
    cover_groups(
        [
            *itertools.product(("operation",), ("element", "scale", "dtype", "block", "shape", "rounding")),
            *itertools.product(("operation",), ("rotation",), ("block", "dtype", "signs", "rounding")),
            *itertools.product(("rotation",), ("element", "scale")),
        ],
        **(FEW | dict(operation=("encode", "reduce_encode"))),
    )
)
# Kernels that only decode.
READS = with_signs(
    cover_groups(
        [
            *itertools.product(("operation",), ("dtype", "rotation", "shape")),
            *itertools.product(("rotation",), ("block", "dtype", "signs")),
            ("element",),
            ("scale",),
        ],
        **(FEW | dict(operation=("reduce_decode", "sum_decode", "decode"), rounding=("nearest",))),
    )
)
# What a kernel keeps in shared memory grows with the ranks of a sum: the largest codes, blocks and scales there are.
SUMS = dict(
    block=(128, 256), rotation=FIELDS["rotation"], what=("bfloat16", "float32", "bfloat16 to float32"), ranks=(2, 8, 16)
)
H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
MESH = AbstractMesh((4,), ("tp",), (AxisType.Auto,), abstract_device=H100)


def lower(f, *shapes) -> str:
    """The program of f for CUDA, lowered without a GPU."""
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> int:
    """How many Mosaic kernels a lowered program calls."""
    return sum("custom_call @mosaic_gpu" in line for line in text.splitlines())


def lower_preset(name, operation, dtype, shape, rounding):
    fmt = to_format(dataclasses.replace(CODECS[name], rounding=rounding), encodes="encode" in operation)
    if operation.startswith("reduce"):
        shape = (shape[0], 4)
        if shape[0] % 128:
            shape = (shape[0] // 128 * 128 + 128, 4)
    text = lower_operation(fmt, operation, dtype, *shape)
    # A tail is a second call.
    assert kernels(text) in (1, 2), text


def lower_operation(fmt, operation, dtype, n, messages) -> str:
    run, shapes = operation_program(fmt, operation, dtype, n, messages)
    return lower(run, *shapes)


def lower_fields(element, block, rotation, scale, operation, dtype, shape=(2 * 64 * 256, 4), rounding="nearest"):
    # int5 has no kernel for blocks of 32.
    fmt = Format(element, 64 if (element, block) == ("int5", 32) else block, rotation, scale, rounding)
    if scale == "site" and fmt.nan is None:
        fmt = dataclasses.replace(fmt, scale="e8m0")
    if operation.startswith("reduce"):
        # Whole blocks of two ranks or more.
        shape = (-(-shape[0] // 256) * 256, max(shape[1], 2))
    if why_unsupported(fmt, operation, dtype, *shape) is None:
        # A tail is a second call.
        assert kernels(lower_operation(fmt, operation, dtype, *shape)) in ((1,) if shape[0] % 16384 == 0 else (1, 2))


def lower_sum(block, rotation, what, ranks):
    """A sum of this many wires of the longest codes and scales, if the kernels have it."""
    fmt, (dtype, *wide) = Format("int8", block, rotation, "float32"), what.split(" to ")
    if why_unsupported(fmt, "reduce_decode", wide[0] if wide else dtype, 2 * 64 * 256, ranks) is None:
        text = lower_operation(fmt, WIDE if wide else "reduce_decode", dtype, 2 * 64 * 256, ranks)
        assert kernels(text) == 1


def named(case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", WRITES, ids=named)
def test_kernels_that_encode(case):
    lower_fields(*case)


@pytest.mark.parametrize("case", READS, ids=named)
def test_kernels_that_only_decode(case):
    lower_fields(*case)


@pytest.mark.parametrize("block,rotation,what", cover(2, **{k: SUMS[k] for k in ("block", "rotation", "what")}))
def test_what_is_supported_fits_the_shared_memory(block, rotation, what):
    """With the most ranks that are supported."""
    dtype = what.rpartition(" ")[2]
    fmt = Format("int8", block, rotation, "float32")
    possible = [n for n in range(2, 17) if why_unsupported(fmt, "reduce_decode", dtype, 2 * 64 * 256, n) is None]
    for ranks in possible[-1:]:
        lower_sum(block, rotation, what, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", cover(4, **SUMS), ids=named)
def test_all_sums_fit_the_shared_memory(case):
    lower_sum(*case)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_more_presets(name, operation):
    for case in cover(3, **PRESET_CASES):
        if case[:2] == (name, operation):
            lower_preset(*case)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("element", KERNEL_ELEMENTS)
def test_more_fields(element, operation):
    for case in cover(3, **FIELDS):
        if (case[0], case[4]) == (element, operation):
            lower_fields(*case)


# In programs that train: `shard_map` that checks types, custom_vjp, remat, scan


def lower_on_mesh(f, *shapes) -> str:
    """f of each device's own row, for four H100 that this machine does not have."""
    own = lambda *xs: f(*(x[0] for x in xs))[None]
    with jax.sharding.use_abstract_mesh(MESH):
        return lower(jax.shard_map(own, mesh=MESH, in_specs=P("tp"), out_specs=P("tp")), *shapes)


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((4, *dims), dtype)


def varying(y):
    return jax.lax.pcast(y, "tp", to="varying")


OFTEN = ("taco", "mxfp4")


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(n, marks=pytest.mark.slow) for n in PRESETS if n not in OFTEN)]
)
def test_psum_is_three_kernels(name):
    text = lower_on_mesh(lambda x: varying(taco_jax.psum(x, "tp", compression=every_size(name))), shape(4, 8192))
    assert kernels(text) == 3
    assert text.count("stablehlo.all_to_all") == text.count("stablehlo.all_gather") == 1


@pytest.mark.slow
def test_other_collectives():
    x = shape(4 * 8192)
    rows = lambda x: x.reshape(4, -1)
    programs = {
        1: lambda x: taco_jax.all_to_all(rows(x), "tp", 0, 0, compression=every_size("taco"), tiled=True),
        2: lambda x: taco_jax.psum_scatter(rows(x), "tp", compression=every_size("taco")),
    }
    assert kernels(lower_on_mesh(programs[2], x)) == 2  # encode, reduce
    assert kernels(lower_on_mesh(programs[1], x)) == 2  # encode, decode
    gather = lambda x: taco_jax.all_gather(x, "tp", compression=every_size("taco"))
    assert kernels(lower_on_mesh(gather, x)) == 2
    one_shot = lambda x: varying(taco_jax.psum(x, "tp", compression=every_size("taco", algorithm="one_shot")))
    assert kernels(lower_on_mesh(one_shot, x)) == 2  # encode, sum


def loss(x, w):
    y = taco_jax.psum(x @ w, "tp", compression=every_size("taco"))
    return jnp.sum(varying(y).astype(jnp.float32) ** 2)


# The scan below is rematerialised as well.
@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients(remat):
    f = jax.checkpoint(loss) if remat else loss
    text = lower_on_mesh(jax.grad(f, argnums=1), shape(256, 64), shape(64, 512))
    assert kernels(text) >= 3


def test_scan():
    def layers(x, ws):
        def layer(x, w):
            return varying(taco_jax.psum(jax.nn.relu(x) @ w, "tp", compression=every_size("int6h"))), None

        return jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32).sum()

    text = lower_on_mesh(jax.grad(layers, argnums=1), shape(256, 512), shape(3, 512, 512))
    assert kernels(text) >= 3
