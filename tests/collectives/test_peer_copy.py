"""Sums of two ranks whose wires are copied: bits, gradients and messages of the exchange, beside which products run."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import taco_jax
from pallas_kernels import KernelUnavailableError
from taco_jax.collectives import comm_log, matmul_psum, peer_copy
from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import SiteScales
from taco_jax.config import CompressionConfig, DataConfig, MeshConfig, ModelConfig, TrainConfig
from taco_jax.tensor_parallel import column_dense, row_dense
from taco_jax.train import links
from taco_jax.train.site_plan import resolve_plan
from taco_jax.train.step import build

ROWS, D, F = 64, 256, 512
SPECS = (P(), P(None, "tp"), P("tp", None))
WAYS = ({"link": "copy"}, {"link": "nccl", "backward_link": "copy"})
MODEL = ModelConfig(vocab_size=256, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, d_mlp=256)


def mesh(ranks=2):
    return jax.make_mesh((ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, ((ROWS, D), (D, F), (F, D)))]


def mlp(compression, x, w_up, w_down, scales=None):
    up, down = (None, None) if scales is None else scales
    h = column_dense(x, w_up, axis="tp", compression=compression, scales=up, site="up")
    y = row_dense(jax.nn.silu(h), w_down, axis="tp", compression=compression, scales=down, site="down")
    return jnp.square(y.astype(jnp.float32)).sum()


def compiled(f, specs, *arguments, out):
    return jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=specs, out_specs=out)).lower(*arguments).compile()


@functools.cache
def first_and_second(codec, way):
    """(loss, gradients, gradients of a sum of gradients) of an mlp, the text of its program, its site table."""
    compression = Compression(codec, min_bytes=0, **dict(way))
    gradients = jax.value_and_grad(functools.partial(mlp, compression), argnums=(0, 1, 2))

    def f(*given):
        bent = lambda x: sum(jnp.sin(g.astype(jnp.float32)).sum() for g in gradients(x, *given[1:])[1][:1])
        return *gradients(*given), jax.grad(bent)(given[0])

    with comm_log.record() as table:
        program = compiled(f, SPECS, *arguments(), out=(P(), SPECS, P()))
    return jax.tree.map(np.asarray, program(*arguments())), program.as_text(), table


@pytest.mark.parametrize("way", WAYS, ids=("both", "backward"))
@pytest.mark.parametrize("codec", ["taco", "int4h"])
def test_values_and_gradients_have_the_bits_of_the_exchange(codec, way):
    wanted, _, _ = first_and_second(codec, (("link", "nccl"),))
    found, text, table = first_and_second(codec, tuple(way.items()))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    copied = sum(row.direction == "backward" or way["link"] == "copy" for row in table.rows())
    hops = [hop for row in table.rows() for hop in row.hlo]
    assert sum(op == "collective-permute" for op, *_ in hops) == copied > 0
    assert "collective-permute" in text and ("all-gather" in text) == (way["link"] == "nccl")


@pytest.fixture
def pieces(monkeypatch):
    """Sums of products of 64 rows go in two pieces."""
    monkeypatch.setattr(matmul_psum, "MIN_PIECES_BYTES", 0)
    monkeypatch.setattr(matmul_psum, "MIN_PIECES_INNER", 0)
    monkeypatch.setattr(matmul_psum, "PIECE_ROWS", 16)
    assert matmul_psum.first_rows(jax.ShapeDtypeStruct((ROWS, D), jnp.bfloat16), F // 2) == 48


@pytest.mark.parametrize("codec", ["taco", "int4h"])
def test_two_pieces_have_the_bits_of_one(codec, pieces):
    wanted, _, _ = first_and_second(codec, (("link", "nccl"),))
    found, text, table = first_and_second.__wrapped__(codec, (("link", "copy"),))
    # Second derivatives are exact, as those of a product and its sum in one kernel are.
    jax.tree.map(np.testing.assert_array_equal, found[:2], wanted[:2])
    hops = {row.site: row.hlo for row in table.rows() if row.direction == "forward"}["down"]
    wire = Compression(codec).codecs[0].wire_bytes
    assert hops == tuple(("collective-permute", "uint8", wire(rows * D)) for rows in (48, 16))
    assert all(f"u8[{size}]" in text for _, _, size in hops)


def test_the_second_piece_s_product_is_beside_the_first_copy(pieces):
    f = jax.shard_map(functools.partial(mlp, Compression("taco", min_bytes=0, link="copy")), mesh=mesh(),
                      in_specs=SPECS, out_specs=P())  # fmt: skip
    text = str(jax.make_jaxpr(f)(*arguments()))
    beside = [line for line in text.splitlines() if "optimization_barrier" in line]
    wire = Compression("taco").codecs[0].wire_bytes
    assert any(f"u8[{wire(48 * D)}]" in line and f"bf16[16,{D}]" in line for line in beside), beside
    assert any(f"u8[{wire(16 * D)}]" in line and f"bf16[48,{D}]" in line for line in beside), beside


def test_pieces_need_no_more_waves_of_tiles():
    rows = lambda *shape, inner=9472: matmul_psum.first_rows(jax.ShapeDtypeStruct(shape, jnp.bfloat16), inner)
    assert rows(4, 4096, 3584) == rows(16384, 3584) == 47 * 256
    assert rows(16384, 512) is None and rows(16000, 3584) is None and rows(16384, 3584, inner=1792) is None


@pytest.mark.parametrize("way", WAYS, ids=("both", "backward"))
def test_products_of_gradients_are_ordered_beside_the_copy(way):
    """The weight's gradient and the wire that arrives pass one barrier, and so do both gradients of the row product."""
    gradients = jax.grad(functools.partial(mlp, Compression("taco", min_bytes=0, **way)), argnums=(0, 1, 2))
    f = jax.shard_map(gradients, mesh=mesh(), in_specs=SPECS, out_specs=SPECS)
    text = str(jax.make_jaxpr(f)(*arguments()))
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    beside = [line for line in barriers if f"u8[{Compression('taco').codecs[0].wire_bytes(ROWS * D)}]" in line]
    assert any(f"bf16[{D},{F // 2}]" in line for line in beside), barriers
    assert any(f"bf16[{F // 2},{D}]" in line and f"bf16[{ROWS},{F // 2}]" in line for line in barriers), barriers


def test_slots_measure_both_messages(request):
    """Calibrated sites of the copied sums, in pieces too, send and measure what the exchange's do."""

    exponents = jnp.array([-2, -6], jnp.int32)

    def measures(way):
        compression = Compression("taco", min_bytes=0, **way)

        def loss(slots, *given):
            return mlp(compression, *given, [SiteScales(exponents, slot) for slot in slots])

        def f(*given):
            return jax.grad(loss)(given[3], *given[:3])

        slots = [jnp.zeros((2, 2, 1)) for _ in range(2)]
        own = lambda *given: jax.tree.map(lambda s: s[None], f(*given[:3], [s[0] for s in given[3]]))
        specs = (*SPECS, [P("tp")] * 2)
        return compiled(own, specs, *arguments(), slots, out=[P("tp")] * 2)(*arguments(), slots)

    wanted = measures({"link": "nccl"})
    jax.tree.map(np.testing.assert_array_equal, measures({"link": "copy"}), wanted)
    request.getfixturevalue("pieces")
    jax.tree.map(np.testing.assert_array_equal, measures({"link": "copy"}), wanted)
    assert all((np.asarray(slot)[:, row] > 0).all() for slot, row in zip(wanted, (1, 0)))


@pytest.mark.parametrize(
    "ranks,options,why",
    [(4, {}, "it is for two ranks of one host, not 4"), (2, {"algorithm": "two_shot"}, "'two_shot' has two hops")],
)
def test_what_cannot_be_copied_is_refused(ranks, options, why):
    compression = Compression("taco", link="copy", min_bytes=0, **options)
    f = lambda x: taco_jax.psum(x, "tp", compression=compression)
    with pytest.raises(KernelUnavailableError, match=f"link 'copy' cannot sum codec 'taco': .*{why}.*use link 'auto'"):
        jax.make_jaxpr(jax.shard_map(f, mesh=mesh(ranks), in_specs=P("tp"), out_specs=P()))(jnp.ones((ranks, 256)))


def test_wrong_options_are_one_line():
    with pytest.raises(ValueError, match="backward_link='cpy' is unknown: did you mean 'copy'"):
        Compression("taco", backward_link="cpy")
    with pytest.raises(ValueError, match="backward_link='copy' knows no errors; it must be None or 'auto' or 'nccl'"):
        Compression("int4h", backward_link="copy", backward_error_feedback=True)


def config(**compression):
    return TrainConfig(
        model=MODEL, mesh=MeshConfig(tp=2), compression=CompressionConfig("taco", "taco", **compression),
        data=DataConfig(sequence_length=32), global_batch=2, remat="full", attention_implementation="xla", steps=4,
    )  # fmt: skip


def test_the_trainer_chooses_links_where_copies_pay(monkeypatch):
    monkeypatch.setattr(links, "why_not_copied", lambda *_: None)
    on = lambda **c: links.choose(resolve_plan(config(**c)), config(**c), None)
    assert {(c.link, c.backward_link) for c in on().values()} == {("auto", "copy")}
    for asked in ({"link": "nccl"}, {"backward_link": "auto"}, {"with_product": True}, {"algorithm": "two_shot"}):
        assert on(**asked) == resolve_plan(config(**asked)), asked
    exact = dataclasses.replace(config(), compression=CompressionConfig("none", "none"))
    assert links.choose(resolve_plan(exact), exact, None) == resolve_plan(exact)
    fed = on(error_feedback=True)
    assert {c.backward_link for c in fed.values() if c.error_feedback} <= {None}


def gpus(count, platform="gpu"):
    kind = types.SimpleNamespace(platform=platform, device_kind="NVIDIA H200", compute_capability="9.0")
    return types.SimpleNamespace(devices=np.array([kind] * count))


def large(**changes):
    model = dataclasses.replace(MODEL, d_model=2048, head_dim=512)
    return dataclasses.replace(
        config(), model=model, data=DataConfig(sequence_length=1024), **{"global_batch": 8, "chains": 1} | changes
    )


def test_copies_are_for_two_gpus_of_one_process(monkeypatch):
    monkeypatch.setattr(links.nvlink, "why_device_unsupported", lambda device: None)
    monkeypatch.setattr(links.hardware, "missing", lambda kind: None)
    why = links.why_not_copied
    assert why(large(), gpus(2)) is None
    assert "GPUs that one process drives" in why(large(), gpus(2, "cpu"))
    assert "tp 4 on 4" in why(large(mesh=MeshConfig(tp=4)), gpus(4))
    assert "tp 2 on 4" in why(large(mesh=MeshConfig(dp=2, tp=2)), gpus(4))
    assert "one chain" in why(large(chains=2), gpus(2))
    assert "one chain" in why(large(sequence_parallel=True), gpus(2))
    assert why(large(global_batch=7), gpus(2)) == "a gradient's 29,360,128 bytes are below 33,554,432"
    monkeypatch.setattr(links.jax, "process_count", lambda: 2)
    assert "one process" in why(large(), gpus(2))


def test_copies_need_peer_memory(monkeypatch):
    monkeypatch.setattr(links.nvlink, "why_device_unsupported", lambda device: None)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE" in links.why_not_copied(large(), gpus(2))


def test_xla_is_told_of_copies(monkeypatch):
    plan = lambda **way: [("up", Compression("taco", **way)), ("down", None)]
    copied = links.compiler_options(plan(backward_link="copy"), 1, "gpu")
    assert copied == links.COPY_OPTIONS and peer_copy.COMPILER_OPTIONS.items() <= copied.items()
    assert links.compiler_options(plan(), 1, "gpu") is None
    assert links.compiler_options(plan(link="copy"), 2, "cpu") is None
    both = links.compiler_options(plan(link="copy"), 2, "gpu")
    assert both == links.rule.CHAIN_OPTIONS | links.PIECE_OPTIONS
    assert links.compiler_options(plan(link="copy"), 1, "gpu") == links.PIECE_OPTIONS
    (name,) = peer_copy.COMPILER_OPTIONS
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=COLLECTIVES_PRIVATE_MEMORY")
    assert name not in links.compiler_options(plan(link="copy"), 1, "gpu")


def test_a_dry_run_says_what_is_copied():
    def said(**way):
        program = build(config(min_bytes=0, **way), jax.sharding.Mesh(
            np.array(jax.devices()[:2]).reshape(1, 1, 2), ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3
        ))  # fmt: skip
        return links.describe(program.parallel.plan, program.config, program.mesh)

    assert said() == "copied: no sums (copies are for GPUs that one process drives)"
    assert said(backward_link="copy") == "copied: gradients' sums (as configured)"
    assert said(link="copy") == "copied: sums (as configured)"


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_a_training_goes_as_with_the_exchange(remat):
    """Sums have the same bits; XLA fuses what is around them in other ways, which moves the last bits of gradients."""

    def losses(**way):
        made = dataclasses.replace(config(min_bytes=0, **way), remat=remat)
        grid = jax.sharding.Mesh(
            np.array(jax.devices()[:2]).reshape(1, 1, 2), ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3
        )
        program = build(made, grid)
        state = program.init(jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, 256, jnp.int32)
        batch = {"tokens": jax.device_put(tokens, program.batch_sharding)}
        for _ in range(3):
            state, metrics = program.step(state, batch)
        return jax.tree.map(np.asarray, (state.params, metrics))

    wanted = losses(link="nccl")
    for way in WAYS:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), losses(**way), wanted)
