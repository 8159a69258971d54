"""Mosaic kernels lower for CUDA on a machine without a GPU: alone, in `shard_map`, and inside of a gradient.

Lowering builds each kernel's program, its register layouts and copies, which is where an operation that Mosaic does not
know fails. Compiling it needs the CUDA plugin: `tests/aot`.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from mosaic_programs import DTYPES, FIELDS, OPERATIONS, PRESETS, WIDE, obstacle, operation_program
from pairs import pairwise

import taco_jax
from pallas_kernels import Format
from pallas_kernels.formats import ELEMENTS
from taco_jax import CODECS
from taco_jax.backend import to_format

# Elements of a message (several tiles; with a tail that is no row; too short for the tiles) and messages.
SHAPES = ((3 * 8192, 4), (8192 + 37, 1), (129, 2))
CASES = dict(name=PRESETS, operation=OPERATIONS, dtype=DTYPES, shape=SHAPES, rounding=("nearest", "stochastic"))
# What a kernel keeps in shared memory grows with the ranks of a sum: the largest codes, blocks and scales there are.
SUMS = dict(ranks=(2, 8, 16), block=(128, 256), rotation=FIELDS["rotation"], dtype=("bfloat16", "float32"))
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


def lower_fields(element, block, rotation, scale, operation, dtype, ranks=4):
    fmt = Format(element, block, rotation, scale)
    if scale == "site" and fmt.nan is None:
        fmt = dataclasses.replace(fmt, scale="e8m0")
    if obstacle(fmt, operation, dtype, 2 * 64 * 256, ranks) is None:
        assert kernels(lower_operation(fmt, operation, dtype, 2 * 64 * 256, ranks)) == 1


@pytest.mark.parametrize("case", pairwise(**CASES), ids=lambda case: "-".join(map(str, case)))
def test_presets(case):
    lower_preset(*case)


@pytest.mark.parametrize("case", pairwise(**FIELDS), ids=lambda case: "-".join(map(str, case)))
def test_fields(case):
    lower_fields(*case)


@pytest.mark.parametrize("ranks,block,rotation", list(itertools.product(*list(SUMS.values())[:3])))
def test_wide_sums_fit_the_shared_memory_where_wide_terms_do(ranks, block, rotation):
    fmt = Format("int8", block, rotation, "float32")
    if obstacle(fmt, "reduce_decode", "float32", 2 * 64 * 256, ranks) is None:
        assert kernels(lower_operation(fmt, WIDE, "bfloat16", 2 * 64 * 256, ranks)) == 1


@pytest.mark.parametrize("ranks,block,rotation,dtype", list(itertools.product(*SUMS.values())))
def test_what_has_no_obstacle_fits_the_shared_memory(ranks, block, rotation, dtype):
    lower_fields("int8", block, rotation, "float32", "reduce_decode", dtype, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_preset(name, operation):
    for rest in itertools.product(DTYPES, SHAPES, CASES["rounding"]):
        lower_preset(name, operation, *rest)


@pytest.mark.slow
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_field(element, operation):
    for rest in itertools.product(FIELDS["block"], FIELDS["rotation"], FIELDS["scale"]):
        for dtype in DTYPES:
            lower_fields(element, *rest, operation, dtype)


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


@pytest.mark.parametrize("name", PRESETS)
def test_psum_is_three_kernels(name):
    text = lower_on_mesh(lambda x: varying(taco_jax.psum(x, "tp", codec=name)), shape(4, 8192))
    assert kernels(text) == 3
    assert text.count("stablehlo.all_to_all") == text.count("stablehlo.all_gather") == 1


def test_other_collectives():
    x = shape(4 * 8192)
    rows = lambda x: x.reshape(4, -1)
    programs = {
        1: lambda x: taco_jax.all_to_all(rows(x), "tp", 0, 0, codec="taco", tiled=True),
        2: lambda x: taco_jax.psum_scatter(rows(x), "tp", codec="taco"),
    }
    assert kernels(lower_on_mesh(programs[2], x)) == 2  # encode, reduce
    assert kernels(lower_on_mesh(programs[1], x)) == 2  # encode, decode
    gather = lambda x: taco_jax.all_gather(x, "tp", codec="taco")
    assert kernels(lower_on_mesh(gather, x)) == 2
    one_shot = lambda x: varying(taco_jax.psum(x, "tp", codec="taco", algorithm="one_shot"))
    assert kernels(lower_on_mesh(one_shot, x)) == 2  # encode, sum


def loss(x, w):
    y = taco_jax.psum(x @ w, "tp", codec="taco")
    return jnp.sum(varying(y).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("remat", [False, True])
def test_gradients(remat):
    f = jax.checkpoint(loss) if remat else loss
    text = lower_on_mesh(jax.grad(f, argnums=1), shape(256, 64), shape(64, 512))
    assert kernels(text) >= 3


def test_scan():
    def layers(x, ws):
        def layer(x, w):
            return varying(taco_jax.psum(jax.nn.relu(x) @ w, "tp", codec="int6h")), None

        return jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32).sum()

    text = lower_on_mesh(jax.grad(layers, argnums=1), shape(256, 512), shape(3, 512, 512))
    assert kernels(text) >= 3
