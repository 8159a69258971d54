"""The forward pass with a kv cache against full recomputation, and what its layout sends; needs nothing but jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import PartitionSpec as P
from model_helpers import CONFIGS, QWEN2, Run

from taco_jax import CODECS, sites
from taco_jax.config import ConfigError
from taco_jax.inference import cache as kv
from taco_jax.inference import forward
from taco_jax.inference.settings import Settings

LENGTHS = np.array([5, 9, 1], np.int32)
SLOTS, NEW = 16, 5


def _functions(run: Run, settings: Settings):
    """jitted (prefill, decode) on the run's mesh."""
    config, device = run.config, run.mesh.devices.flat[0]
    layouts = [settings.layout(config, device, decoding=decoding) for decoding in (False, True)]
    mapped = lambda f, ins, **options: jax.jit(
        jax.shard_map(f, mesh=run.mesh, in_specs=(run.specs, *ins), out_specs=(P(), kv.specs())), **options
    )
    prefill = lambda p, t, n: forward.prefill(p, t, n, SLOTS, config, layouts[0])
    decode = lambda p, t, at, c: forward.decode(p, t, at, c, config, layouts[1])
    return mapped(prefill, (P(), P())), mapped(decode, (P(), P(), kv.specs()), donate_argnums=3)


# kv heads are replicated at qwen2 tp 4 and qwen3 tp 8.
@pytest.mark.parametrize("name, tp", [("qwen2", 4), ("gpt2", 2), ("qwen3", 8), ("llama", 1)])
def test_decode_equals_full_recomputation(name, tp):
    run = Run(CONFIGS[name], tp=tp, batch=3, length=SLOTS)
    params, tokens = run.params(), run.batch_arrays()[0]
    want = run.logits(params, tokens)
    prefill, decode = _functions(run, Settings(tp, dtype="float32"))
    rows = np.arange(3)
    logits, cache = prefill(params, tokens[:, :10], LENGTHS)  # what lies behind a prompt must not matter
    np.testing.assert_allclose(logits, want[rows, LENGTHS - 1], atol=1e-6)
    for position in range(NEW):
        at = LENGTHS + position
        given = cache
        logits, cache = decode(params, tokens[rows, at], at, given)
        np.testing.assert_allclose(logits, want[rows, at], atol=1e-6, err_msg=f"token {position}")
        assert given.keys.is_deleted()


def test_a_position_beyond_the_last_slot_changes_nothing():
    cache = kv.KVCache(*(jnp.zeros((1, 2, 4, 1, 2)),) * 2)
    new = jnp.ones((2, 1, 1, 2))
    written = kv.write(cache, jnp.int32(0), jnp.array([4, 1]), new, new)
    assert float(written.keys[:, 0].sum()) == 0 and written.values[0, 1, :, 0, 0].tolist() == [0, 1, 0, 0]


PLAN = {"layers/0/mlp/*": "int8h", "layers/mlp/down": "int6h,block=64", "layers/0/attn/out": None}


def test_layers_may_send_differently():
    run = Run(QWEN2, tp=4, batch=2, length=32)
    params, tokens = run.params(), run.batch_arrays()[0]
    prefill, _ = _functions(run, Settings(4, "mxfp4", PLAN, 0, "float32"))
    with sites.record() as table:
        lowered = prefill.lower(params, tokens[:, :SLOTS], LENGTHS[:2])
    rows = {row.site: row for row in table.rows() if row.kind == "activation"}
    assert {site: row.codec for site, row in rows.items()} == {
        "embed": "none", "layers/0-0/attn/out": "none", "layers/0-0/mlp/down": "int8h",
        "layers/1-1/attn/out": "mxfp4", "layers/1-1/mlp/down": "int6-64-hadamard-bfloat16",
    }  # fmt: skip
    sent = sorted(size for _, dtype, size in collectives(lowered.compile()) if dtype == "uint8")
    assert sent == sorted(size for row in rows.values() for _, dtype, size in row.hlo if dtype == "uint8")
    assert len(sent) == 6  # two hops of each compressed site


@pytest.mark.parametrize("codec", ["int8h", "mxfp4,block=16,scale=ue5m3"])
def test_logits_with_compressed_sums_are_near_and_not_equal(codec):
    run = Run(QWEN2, tp=4, batch=3, length=SLOTS)
    params, tokens = run.params(), run.batch_arrays()[0]
    exact, _ = _functions(run, Settings(4, dtype="float32"))[0](params, tokens[:, :10], LENGTHS)
    logits, _ = _functions(run, Settings(4, codec, {}, 0, "float32"))[0](params, tokens[:, :10], LENGTHS)
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 0 < error < (0.03 if codec == "int8h" else 0.25)


def test_one_setting_is_one_segment_under_the_decoder_s_own_names():
    layout = Settings(2, "taco").layout(QWEN2, jax.devices()[0], decoding=False)
    assert [segment.sites_of for segment in layout.segments] == ["layers"]
    assert layout.par.compression("layers/mlp/down").forward == CODECS["taco"]
    assert set(layout.scales()) == {"layers/attn/out", "layers/mlp/down"}  # a scale of ue5m3: the site scale is 1
    decoding = Settings(2, "taco").layout(QWEN2, jax.devices()[0], decoding=True)
    assert decoding.par.compression("layers/mlp/down").min_bytes == 1 << 16
    forced = Settings(2, "taco", min_bytes=0).layout(QWEN2, jax.devices()[0], decoding=True)
    assert forced.par.compression("layers/mlp/down").min_bytes == 0


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ConfigError, match="'layers/9/mlp/down' matches no site: did you mean 'layers/"):
        Settings(2, plan={"layers/9/mlp/down": "taco"}).layout(QWEN2, jax.devices()[0], decoding=False)
