"""Megatron's pairs as a model uses them: gradients against the unsharded model, options, and where they may stand."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import cover
from gradients import x_of
from helpers import make_mesh
from hlo import counts
from jax.sharding import PartitionSpec as P
from megatron_mlp import (
    SPECS,
    D,
    L,
    check_pair,
    mlp,
    mlp_parameters,
    x_mlp,
)
from shards import per_rank

from taco_jax import Compression
from taco_jax.nn import tensor_parallel as tp

PAIRS = {"codec": (None, "taco", "int8h", "mxfp8"), "ranks": (1, 2, 4, 8), "sequence_parallel": (False, True)}


# Any two meet, but for a third codec and eight ranks, which are in the full product.
FEW = {**PAIRS, "codec": (None, "taco", "int8h"), "ranks": (1, 2, 4)}


@pytest.mark.parametrize("codec,ranks,sequence_parallel", cover(2, **FEW))
def test_gradients_of_the_pairs_are_those_of_the_unsharded_model(codec, ranks, sequence_parallel):
    check_pair(codec, ranks, sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("codec,ranks,sequence_parallel", list(itertools.product(*PAIRS.values())))
def test_gradients_of_the_pairs_everywhere(codec, ranks, sequence_parallel):
    check_pair(codec, ranks, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_row_bias_is_added_once(sequence_parallel):
    w, x = mlp_parameters(), np.zeros((L, D), np.float32)
    w = {k: np.zeros_like(v) for k, v in w.items()} | {"b_down": np.arange(D, dtype=np.float32)}
    mesh = make_mesh(tp=4)
    dim = 0 if sequence_parallel else None
    spec = P("tp") if sequence_parallel else P()
    f = jax.shard_map(
        functools.partial(mlp, compression="taco", sequence_dim=dim), mesh=mesh, in_specs=(SPECS, spec), out_specs=spec
    )
    np.testing.assert_array_equal(jax.jit(f)(w, x), np.broadcast_to(w["b_down"], (L, D)))


def test_dtype_and_promotion():
    w, x = mlp_parameters(), x_mlp()

    def local(w, x):
        y = tp.column_dense(x, w["up"], w["b_up"], axis="tp", compression="taco", dtype=jnp.bfloat16)
        z = tp.row_dense(y, w["down"], w["b_down"], axis="tp", compression="taco")
        return tp.reduce_from_tp(jnp.sum(y.astype(jnp.float32)), "tp"), z, jnp.zeros((), y.dtype)

    f = jax.jit(jax.shard_map(local, mesh=make_mesh(tp=2), in_specs=(SPECS, P()), out_specs=P()))
    _, z, y = f(w, x)
    assert y.dtype == jnp.bfloat16 and z.dtype == jnp.float32


def test_compression_options_arrive():
    """min_bytes and algorithm of a Compression reach the collective."""
    x_P = x_of(4)
    for compression, expected in {
        Compression("int8h", min_bytes=0): {"all-to-all": 1, "all-gather": 1},
        Compression("int8h", min_bytes=0, algorithm="one_shot"): {"all-gather": 1},
        Compression("int8h", min_bytes=x_P[0].nbytes + 1): {"all-reduce": 1},
        None: {"all-reduce": 1},
    }.items():
        f = per_rank(lambda x, c=compression: tp.reduce_from_tp(x, "tp", c), 4, invarying_out=True)
        assert counts(f.lower(x_P).compile()) == expected


@pytest.mark.parametrize("entry", [tp.copy_to_tp, tp.reduce_from_tp, tp.gather_from_sp, tp.scatter_to_sp])
@pytest.mark.parametrize("compression", [None, "taco"])
def test_pairs_check_their_region(entry, compression):
    keywords = {"dim": 0} if entry in (tp.gather_from_sp, tp.scatter_to_sp) else {}
    f = lambda x: entry(x, "tp", compression, **keywords)
    mesh = make_mesh(dp=2, tp=2)
    x = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match="not a manual mesh axis here"):
        f(x)
    with pytest.raises(ValueError, match="check_vma=False"):
        jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)


def test_in_manual_region():
    seen = []
    f = lambda x: (seen.append([tp.in_manual_region(a) for a in ("tp", "dp", ("dp", "tp"), "none")]), x)[1]
    mesh = make_mesh(dp=2, tp=2)
    x = np.ones((4, 4), np.float32)
    f(x)
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P()))(x)
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"tp"}))(x)
    assert seen == [[False] * 4, [True, True, True, False], [True, False, False, False]]
