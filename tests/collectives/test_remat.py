"""Remat: the gradient of a stack of layers holds no message twice, and its values stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from hlo import collectives, counts
from jax import lax
from jax.sharding import PartitionSpec as P
from megatron_mlp import SPECS, mlp, mlp_parameters, x_mlp

from taco_jax import Compression, SiteScales
from taco_jax.nn import tensor_parallel as tp

LAYERS = 3


def stack_program(remat, sequence_parallel=False, compression="taco"):
    def layer(x, w):
        w, slots = w
        scales = {k: SiteScales(np.array([-6, -6], np.int32), slots[i]) for i, k in enumerate(("up", "down"))}
        # tanh's gradient needs the sum, so a layer that is not told to keep it sums again.
        return jnp.tanh(mlp(w, x, compression, scales, 0 if sequence_parallel else None))

    policy = jax.checkpoint_policies.save_only_these_names(*tp.REMAT_NAMES)
    body = {"none": layer, "full": jax.checkpoint(layer), "named": jax.checkpoint(layer, policy=policy)}[remat]

    def local(w, slots, x):
        def loss(w, slots):
            y, _ = lax.scan(lambda x, w: (body(x, w), None), x, (w, slots[:, 0]))
            loss = jnp.mean(y**2)
            return lax.pmean(loss, "tp") if sequence_parallel else loss

        return jax.grad(loss, argnums=(0, 1))(w, slots)

    specs = jax.tree.map(lambda spec: P(None, *spec), SPECS, is_leaf=lambda s: isinstance(s, P))
    slots = P(None, "tp")
    x_spec = P("tp") if sequence_parallel else P()
    step = jax.shard_map(local, mesh=make_mesh(tp=4), in_specs=(specs, slots, x_spec), out_specs=(specs, slots))
    return jax.jit(step)


def stack_arguments():
    w = jax.tree.map(lambda *leaves: np.stack(leaves), *[mlp_parameters(seed) for seed in range(LAYERS)])
    return w, np.zeros((LAYERS, 4, 2, 2, 1), np.float32), x_mlp()


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_remat_repeats_no_communication(sequence_parallel):
    """Counted in the bodies of the two loops: one all-reduce (or gather and scatter) per layer and direction."""
    arguments = stack_arguments()
    found, grads = {}, {}
    # What a repeated message looks like is seen once.
    remats = ("none", "named") if sequence_parallel else ("none", "named", "full")
    for remat in remats:
        f = stack_program(remat, sequence_parallel)
        found[remat] = [c for c in collectives(f.lower(*arguments).compile()) if c[1] == "uint8"]
        grads[remat] = jax.tree.map(np.asarray, f(*arguments))
    assert len(found["none"]) == 4
    assert found["named"] == found["none"]
    assert "full" not in found or len(found["full"]) > len(found["none"])  # so the count can see a repeated message
    for remat in remats[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads[remat], grads["none"])
    assert (grads["named"][1][..., 0].sum((0, 1)) > 0).sum() >= 2  # slots arrive through the scan


def test_remat_repeats_no_exact_communication_below_min_bytes():
    arguments = stack_arguments()
    small = Compression("taco", min_bytes=1 << 30)
    found = {
        remat: counts(stack_program(remat, compression=small).lower(*arguments).compile())["all-reduce"]
        for remat in ("none", "named", "full")
    }
    assert found["named"] == found["none"] < found["full"]
