"""Products with their all-reduce as XLA compiles them for H100s: one kernel, no collective, products not serialised."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from aot.instructions import collectives, kernels
from aot.topology import FITTED, compile_on_mesh, spills
from jax import lax

from pallas_kernels import compat, matmul_all_reduce
from taco_jax import CODECS
from taco_jax.collectives import to_varying
from taco_jax.compression.compression import Compression
from taco_jax.compression.dispatch import to_format
from taco_jax.tensor_parallel import column_dense, row_dense

pytestmark = pytest.mark.skipif(not compat.WARPS_KNOW_THE_MESH, reason="kernels over NVLink need jax 0.11")

NAMES = ("taco", "e4m3h", "int8h", "int6h", "int5h", "int4h")
# Bytes of a thread's local memory; none on four ranks, with the ptxas that the kernels are fitted to.
TWO_RANKS, OTHER_PTXAS = 64, 128
M, K, N = 16384, 1152, 3584


def check(name, ranks, transposed, capfd):
    fmt = to_format(CODECS[name])

    def run(x, w):
        return to_varying(
            matmul_all_reduce.matmul_all_reduce(fmt, x, w, "tp", exponent=jnp.int32(-3), transposed=transposed)[0],
            ("tp",),
        )

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    capfd.readouterr()
    compiled = compile_on_mesh(run, shape(M, K), shape(*((N, K) if transposed else (K, N))), tp=ranks)
    reported = capfd.readouterr().out
    assert kernels(compiled) == 1 and collectives(compiled) == []
    assert "for 'sm_90a'" in reported and "serialized" not in reported, reported
    most = (TWO_RANKS if ranks == 2 else 0) + (0 if FITTED else OTHER_PTXAS)
    assert all(max(kernel) <= most for kernel in spills(reported)), reported


@pytest.mark.parametrize("name,ranks,transposed", [("taco", 4, False), ("int4h", 4, True), ("taco", 2, True)])
def test_in_the_forms_that_models_use(name, ranks, transposed, capfd):
    check(name, ranks, transposed, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_preset(name, capfd):
    for ranks, transposed in itertools.product(matmul_all_reduce.RANKS, (False, True)):
        check(name, ranks, transposed, capfd)


def test_gradient_of_layers():
    """One kernel for the sum of the forward pass, one for that of the backward pass; recomputing repeats neither."""
    compression = Compression("taco", backward="int8h", link="nvlink", min_bytes=0, with_product=True)

    def layers(x, ws):
        @jax.checkpoint
        def layer(x, ws):
            h = jax.nn.relu(column_dense(x, ws[0], axis="tp", compression=compression))
            return x + row_dense(h, ws[1], axis="tp", compression=compression), None

        return lax.scan(layer, x, ws)[0].astype(jnp.float32).sum()

    def gradient(scale, w_up, w_down):
        x = jnp.ones((1024, w_up.shape[1]), w_up.dtype) * lax.psum(scale, "tp").astype(w_up.dtype)
        grads = jax.grad(layers, argnums=1)(x, (w_up, w_down))
        return to_varying(grads[0], ("tp",))

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    compiled = compile_on_mesh(gradient, shape(), shape(3, 512, 256), shape(3, 256, 512), tp=4)
    assert kernels(compiled) == 2
