"""NVLink kernels lower for CUDA on a machine without a GPU, on every jax that has them. `.ci/aot` compiles them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from covers import cover, cover_groups
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import compat, nvlink
from pallas_kernels.formats import Geometry
from taco_jax import CODECS
from taco_jax.compat import as_varying
from taco_jax.compression.dispatch import to_format

pytestmark = pytest.mark.skipif(not compat.WARPS_KNOW_THE_MESH, reason="NVLink kernels need jax 0.11")

TILE = 64 * 128
NAMES = ("taco", "e4m3", "int8h", "int6h", "int4h", "mxfp8", "mxfp4")
KINDS = ("two_shot", "one_shot", "reduce_scatter", "all_gather")
# Names that kernels might have for their own axes.
MESHES = {"tp": (8,), "dp tp": (2, 4), "tp dp": (2, 4), "role cta tp": (2, 2, 2), "warpgroup tp": (4, 2)}


def run(kind, name, x_S, axis="tp"):
    fmt, ranks, size = to_format(CODECS[name]), lax.axis_size("tp"), x_S.size
    if kind == "two_shot":
        return nvlink.all_reduce(fmt, Geometry(size, ranks, size // ranks), x_S, "tp")
    if kind == "one_shot":
        return nvlink.all_reduce(fmt, Geometry(size, 1, size), x_S, "tp", exponent=jnp.int32(-3))
    if kind == "reduce_scatter":
        return nvlink.reduce_scatter(fmt, x_S.reshape(ranks, -1), "tp")
    return nvlink.all_gather(fmt, x_S, "tp")


def lowered(f, axes, dims, shape, dtype):
    """The text of f, lowered for GPUs as a region over the mesh; every device has its own array."""
    mesh = jax.make_mesh(dims, axes, axis_types=(AxisType.Auto,) * len(dims))

    def own(x):
        return jax.tree.map(lambda y: as_varying(y, axes).reshape(1, -1), f(x[0]))

    g = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))
    x = jax.ShapeDtypeStruct((mesh.size, *shape), dtype)
    return g.trace(x).lower(lowering_platforms=("cuda",)).as_text()


CASES = dict(kind=KINDS, name=NAMES, dtype=("bfloat16", "float16", "float32"), mesh=tuple(MESHES), tiles=(1, 300))


FEW = cover_groups([("kind", "dtype"), ("kind", "tiles"), ("name",), ("mesh",)], **CASES)
MORE = [case for case in cover(2, **CASES) if case not in FEW]


@pytest.mark.parametrize(
    "case",
    [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_one_kernel(case):
    kind, name, dtype, mesh, tiles = case
    axes, dims = tuple(mesh.split()), MESHES[mesh]
    ranks = dims[axes.index("tp")]
    text = lowered(functools.partial(run, kind, name), axes, dims, shape=(ranks * tiles * TILE,), dtype=dtype)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert not any(f"stablehlo.{name}" in text for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"))


@pytest.mark.parametrize(
    "f, message",
    [
        (lambda x: nvlink.all_reduce(FMT, Geometry(x.size, 4, x.size // 4), x, "tp"), "one for each of the 2 ranks"),
        (
            lambda x: nvlink.all_reduce(FMT, Geometry(TILE, 1, TILE), x, "tp"),
            "not of the whole groups of 8 rows",
        ),
        (lambda x: nvlink.reduce_scatter(FMT, x[: 2 * 8320].reshape(2, -1), "tp"), "multiples of 1024 elements"),
        (lambda x: nvlink.all_gather(FMT, x[: TILE + 128], "tp"), "whole groups of 8 rows of 128"),
        (lambda x: nvlink.all_gather(FMT, x[:2048], "tp"), "64 rows or more"),
    ],
)
def test_messages_that_kernels_would_read_wrongly_are_refused(f, message):
    with pytest.raises(ValueError, match=message):
        lowered(f, ("tp",), (2,), shape=(8 * TILE,), dtype="bfloat16")


FMT = to_format(CODECS["taco"])
