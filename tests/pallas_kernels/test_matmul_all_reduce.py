"""Products with their all-reduce, without a GPU: what they refuse, and that they lower for CUDA as one kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from matmul_all_reduce_model import check, model, operands

from pallas_kernels import compat, matmul_all_reduce
from taco_jax import CODECS
from taco_jax.collectives import to_varying
from taco_jax.compression.dispatch import to_format

needs_new_jax = pytest.mark.skipif(not compat.WARPS_KNOW_THE_MESH, reason="kernels over NVLink need jax 0.11")
FMT = to_format(CODECS["taco"])


@needs_new_jax
@pytest.mark.parametrize(
    "changed,said",
    [
        ({"ranks": 8}, "2 or 4 ranks, not 8"),
        ({"dtype": "float32"}, "bfloat16, not float32"),
        ({"m": 16400}, "rows in multiples of 256, not 16400"),
        ({"k": 100}, "inner dimension in multiples of 64, not 100"),
        ({"n": 3600}, "columns in multiples of 128, not 3600"),
        ({"m": 0}, "rows in multiples of 256, not 0"),
        ({"fmt": to_format(CODECS["mxfp8"])}, "rotates blocks of 128"),
        ({"fmt": to_format(CODECS["e4m3"])}, "rotates blocks of 128"),
    ],
)
def test_what_is_unsupported(changed, said):
    given = {"fmt": FMT, "m": 16384, "k": 1152, "n": 3584, "dtype": "bfloat16", "ranks": 4}
    assert matmul_all_reduce.why_unsupported(**given) is None
    assert said in matmul_all_reduce.why_unsupported(**(given | changed))


def test_old_jax_is_unsupported(monkeypatch):
    monkeypatch.setattr(compat, "WARPS_KNOW_THE_MESH", False)
    assert "jax 0.11" in matmul_all_reduce.why_unsupported(FMT, 256, 64, 128, dtype="bfloat16", ranks=4)


@needs_new_jax
def test_operands_without_a_product_raise():
    x, w = jnp.ones((256, 64), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="have no product"):
        matmul_all_reduce.matmul_all_reduce_loopback(FMT, x, w, 4)
    with pytest.raises(ValueError, match="multiples of 128"):
        matmul_all_reduce.matmul_all_reduce_loopback(FMT, x, jnp.ones((64, 100), jnp.bfloat16), 4)


@needs_new_jax
@pytest.mark.parametrize("dims,transposed", [((4, 2), False), ((2, 4), True)])
def test_one_kernel_on_meshes_of_two_axes(dims, transposed):
    mesh = jax.make_mesh(dims, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    run = functools.partial(
        matmul_all_reduce.matmul_all_reduce, FMT, axis="tp", exponent=jnp.int32(-3), transposed=transposed
    )
    own = lambda x, w: to_varying(run(x[0], w[0])[0], ("dp", "tp"))[None]
    f = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P(("dp", "tp"))))
    x = jax.ShapeDtypeStruct((8, 512, 192), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((8, 384, 192) if transposed else (8, 192, 384), jnp.bfloat16)
    text = f.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_the_model_is_near_the_sum():
    """So that the tests on GPUs compare with something that is right."""
    x, w = operands(4, 256, 64, 128)
    exact = sum(a.astype(np.float32) @ b.astype(np.float32) for a, b in zip(x, w))
    found = model("int8h", x, w).astype(np.float32)
    assert 1e-3 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.02
    with pytest.raises(AssertionError):
        check("int8h", found * 1.01, found)
