"""Levels inside gradients: Megatron's pairs, site scales, layers, models, and a run over two processes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gradients import slots_of
from helpers import make_mesh
from hlo import collectives
from jax.sharding import PartitionSpec as P
from megatron_mlp import check_pair
from model_helpers import CONFIGS, Run, check_decoder, compare_replicas
from reference_codec import snr_db
from shards import bits_of_every_device, per_rank

import taco_jax
from taco_jax import CODECS, UNCALIBRATED, Codec, CompressedDense, Compression, SiteScales
from taco_jax.collectives import comm_log, topology
from taco_jax.collectives.message import exponent_of, in_units_of

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
LEVELS = functools.partial(Compression, algorithm="hierarchical", min_bytes=0)


@pytest.mark.parametrize(
    "ranks,local,codec,between,sequence_parallel",
    [(8, 4, "taco", None, False), (8, 2, "int8h", "int6h", True), SLOW(4, 2, "mxfp8", None, True),
     SLOW(8, 2, "taco", "int8h", False)],
)  # fmt: skip
def test_gradients_of_the_pairs_are_those_of_the_unsharded_model(ranks, local, codec, between, sequence_parallel):
    check_pair(LEVELS(codec, ranks_per_host=local, between_hosts=between), ranks, sequence_parallel)


MODELS = [
    SLOW("qwen2", {"tp": 4, "dp": 2, "ranks_per_host": 2, "sequence_parallel": True, "between_hosts": "int6h"}),
    SLOW("gpt2", {"tp": 8, "ranks_per_host": 4, "remat": "full"}),
    SLOW("qwen2", {"tp": 8, "ranks_per_host": 2, "chains": 2}),
]


@pytest.mark.parametrize("name,settings", MODELS)
def test_messages_of_a_model(name, settings):
    compiled, table = Run(CONFIGS[name], codec="taco", **settings).compiled()
    levelled = [row for row in table.rows() if row.levels]
    assert levelled and {r.site for r in levelled} == {r.site for r in table.rows() if r.kind == "activation"}
    found = {message for message in collectives(compiled) if message[1] == "uint8"}
    assert found == {message for row in levelled for message in row.hlo}


@pytest.mark.slow  # gradients of the pairs that models consist of are above
@pytest.mark.parametrize("name,settings", MODELS)
def test_gradients_of_a_model(name, settings):
    check_decoder(Run(CONFIGS[name], codec="taco", **settings))


def test_slots_hold_the_largest_scale_of_every_hop():
    """Equal terms: hosts' sums are 4 times one rank's, the sum 8 times. The codec between hosts has other scales."""
    base = np.random.default_rng(0).normal(size=8 * 600).astype(np.float32)
    x_P = np.tile(base, (8, 1))
    one = np.abs(CODECS["taco"].to_blocks(base)).max() / 448
    for local, between in ((4, "int4h"), (2, "int6h")):
        levels = LEVELS("taco", ranks_per_host=local, between_hosts=between)
        f = lambda x, scales, c=levels: jnp.sum(taco_jax.psum(x, "tp", compression=c, scales=scales))
        slots, _ = slots_of(f, 8, x_P, np.array([-5, 7], np.int32), width=6)
        assert not slots[:, 1].any()
        # Every rank has a share of the sum, and one of them that with the largest block; all have quantised the terms.
        assert (slots[:, 0, 0] >= one * (1 - 1e-5)).all() and slots[:, 0, 0].max() == pytest.approx(8 * one, rel=0.1)
        # Elements of all hops: the terms, the hosts' sums, and of the sum what this host or this rank has of it.
        n, hosts_ = 5 * 128, 8 // local
        assert (slots[:, 0, 5] == 8 * n + hosts_ * n + (hosts_ * n if hosts_ == 2 else n)).all()


def test_units_of_two_codecs():
    taco, int4 = CODECS["taco"], CODECS["int4h"]
    measure = jnp.array([64.0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(in_units_of(taco, int4, measure), [1, 1, 2, 3, 4, 5])
    assert in_units_of(taco, taco, measure) is measure and in_units_of(taco, int4, measure[:1]) == 1
    assert exponent_of(taco, int4, jnp.int32(-9)) == -3 and exponent_of(taco, int4, None) is None
    assert exponent_of(taco, int4, jnp.int32(UNCALIBRATED)) == UNCALIBRATED


@pytest.mark.parametrize("local", [SLOW(2), 4])
def test_a_calibrated_exponent_fits_both_codecs(local):
    """With one scale for a whole message an exponent of the wrong unit would clip, or leave few codes."""
    x_P = np.random.default_rng(0).normal(size=(8, 4096)).astype(np.float32)
    inner, outer = (Codec(element, 128, "hadamard", "site") for element in ("int8", "int6"))
    levels = LEVELS(inner, ranks_per_host=local, between_hosts=outer)
    f = lambda x, scales: jnp.sum(taco_jax.psum(x, "tp", compression=levels, scales=scales))
    slots, _ = slots_of(f, 8, x_P, np.full(2, UNCALIBRATED, np.int32))
    calibrated = np.array([np.ceil(np.log2(slots[:, 0].max())), 0], np.int32)
    quality = {}
    sum_of = lambda x, exponents: taco_jax.psum(x[0], "tp", compression=levels, scales=SiteScales(exponents, None))
    program = jax.jit(jax.shard_map(sum_of, mesh=make_mesh(tp=8), in_specs=(P("tp"), P()), out_specs=P()))
    for name, exponents in (("no", np.full(2, UNCALIBRATED, np.int32)), ("yes", calibrated)):
        y = program(x_P, exponents)
        quality[name] = snr_db(x_P.sum(0), y)
        assert len(set(bits_of_every_device(y))) == 1
    # The power of two that the sum needs is up to 1 and, for two hosts, 2 bits above what the first hops need.
    assert quality["no"] - 14 < quality["yes"] < quality["no"] + 1 and quality["yes"] > 12


@pytest.mark.slow
def test_a_layer_asks_its_mesh(monkeypatch):
    mesh = jax.make_mesh((1, 8), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.random.default_rng(0).normal(size=(4, 16, 64)).astype(np.float32)

    def levels(compression):
        layer = CompressedDense(64, 64, kind="row", compression=compression, mesh=mesh, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        with comm_log.record() as table:
            y = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
        (row,) = [row for row in table.rows() if row.op == "psum" and row.direction == "forward"]
        return [(level.ranks, level.codec) for level in row.levels], y

    exact = levels(None)[1]
    assert levels("int8h")[0] == []
    monkeypatch.setattr(topology, "_host", lambda device: device.id // 4)
    assert levels("taco")[0] == [(4, "taco"), (2, "taco")]
    found, y = levels(Compression("int8h", between_hosts="int6h"))
    assert found == [(4, "int8h"), (2, "int6h")] and snr_db(exact, y) > 28
    assert levels(Compression("int8h", ranks_per_host=2))[0] == [(2, "int8h"), (4, "int8h")]


@pytest.mark.slow
def test_messages_under_way_have_a_hop_for_each_collective():
    x_P = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)

    def f(local):
        def run(x):
            levels = LEVELS("mxfp8", ranks_per_host=local)
            started, value, hops = taco_jax.collectives.start_psum(x, "tp", "forward", compression=levels), x, 0
            while started.hops:
                value, hops = started.overlap_with(value + 1), hops + 1
            assert hops == (4 if local == 2 else 3)
            return started.done()[0], value - hops - taco_jax.collectives.to_varying(x, "tp")

        return per_rank(lambda x: jax.tree.map(lambda y: taco_jax.collectives.to_varying(y, "tp"), run(x)), 8)

    for local in (2, 4):
        y_P, rest_P = f(local)(x_P)
        psum = lambda x, n=local: taco_jax.psum(
            x, "tp", compression=Compression("mxfp8", algorithm="hierarchical", ranks_per_host=n)
        )
        np.testing.assert_array_equal(y_P[3], per_rank(psum, 8, invarying_out=True)(x_P))
        np.testing.assert_allclose(rest_P, 0, atol=1e-5)


def trained(**changes):
    """(losses of a few steps, program, state) with tp 8 on emulated hosts of 4."""
    from data_parallel_programs import ADAM, CONFIG, batch

    from taco_jax.config import CompressionConfig, MeshConfig
    from taco_jax.mesh import make_mesh
    from taco_jax.train.step import build

    model = dataclasses.replace(CONFIG.model, n_heads=8, n_kv_heads=8, n_layers=2)
    mesh = MeshConfig(tp=8, devices_per_host=changes.pop("devices_per_host", 4))
    compression = CompressionConfig(**({"min_bytes": 0} | changes))
    config = dataclasses.replace(CONFIG, model=model, mesh=mesh, compression=compression, optimizer=ADAM)
    p = build(config, make_mesh(1, 1, 8))
    state, losses = p.init(jax.random.key(0)), []
    for step in range(6):
        state, metrics = p.step(state, batch(p, step % 2))
        losses.append(float(metrics["loss"]))
    return np.array(losses), p, state


@pytest.mark.slow
def test_the_trainer_goes_in_levels():
    exact, *_ = trained(forward="none", backward="none")
    losses, p, state = trained(forward="taco", backward="taco", between_hosts="int6h")
    assert losses == pytest.approx(exact, rel=0.01) and losses[-1] < losses[0] - 0.1
    compare_replicas(state)
    rows = [row for row in p.table.rows() if row.kind == "activation"]
    assert rows and all([level.ranks for level in row.levels] == [4, 2] for row in rows)
    found = {message for message in collectives(p.step) if message[1] == "uint8"}
    assert found == {message for row in rows for message in row.hlo}
