"""The dry run: what it says is what the state and the compiled step are."""

import dataclasses
import re

import jax
import pytest
import token_writers
from programs import CONFIG

from pallas_kernels import OPERATIONS
from taco_jax.compression import dispatch, tuned
from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    DataParallelConfig,
    MeshConfig,
)
from taco_jax.mesh import make_mesh
from taco_jax.train import dry_run, step


@pytest.fixture(scope="module")
def program():
    return step.build(CONFIG, make_mesh(2, 1, 4))


def test_memory_is_that_of_the_arrays(program):
    memory = dry_run.memory(program)
    state = program.init(jax.random.key(0))
    local = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert memory.params == memory.gradients == local(state.params)
    assert memory.optimizer == local(state.opt_state)
    assert memory.scales == local(state.scales)
    assert memory.peak >= memory.params + memory.optimizer + memory.temporary > memory.temporary > 0


def test_report_allocates_nothing_and_lists_every_site(program):
    before = jax.live_arrays()  # held: another test's array that is collected meanwhile does not count
    text = dry_run.report(CONFIG, program.mesh)
    assert {*map(id, jax.live_arrays())} <= {*map(id, before)}
    for site in ("embed", "layers/attn/qkv", "layers/attn/out", "layers/mlp/up", "layers/mlp/down", "head"):
        assert re.search(rf"^  {site} .* (taco|int8h) ", text, re.M), site
    assert re.search(r"^  dp/grads/0 .* int8h ", text, re.M)
    assert re.search(r"^  layers/attn/out .* taco .* two_shot \(the rule for 4 ranks\)$", text, re.M)
    for exact in ("head/softmax", "scales/amax"):
        assert re.search(rf"^  {exact} .* none ", text, re.M), exact
    sent, bf16 = program.table.total()
    assert f"{sent / 1e6:.3f} MB a step, {bf16 / sent:.3f}x less" in text
    assert "jnp: " in text and '"sequence_length": 32' in text


def test_what_runs_the_codecs_is_one_line_where_it_is_one(program, monkeypatch):
    text = lambda choices: dry_run._kernel_text(program, choices).splitlines()[1:-2]
    jnp, mosaic = ("jnp", "too many"), ("mosaic", "runs")
    same = {(codec, operation): [mosaic] for codec in ("int8h", "taco") for operation in OPERATIONS}
    assert text(same) == [f"  {c:12} mosaic: runs" for c in ("int8h", "taco")]
    assert text(same | {("int8h", "reduce"): [jnp]}) == [
        "  int8h        mosaic (encode, decode): runs",
        "  int8h        jnp (reduce): too many",
        "  taco         mosaic: runs",
    ]
    # Messages of several sizes need not have the same kernels.
    assert text(same | {("int8h", "decode"): [mosaic, jnp]})[:2] == [
        "  int8h        mosaic (encode, reduce, decode): runs",
        "  int8h        jnp (decode): too many",
    ]
    assert text({}) == [f"  {c:12} jax.lax: every message goes exactly" for c in ("int8h", "taco")]


def kernels(**compression):
    """The report's part on what runs the codecs, for which nothing has to be compiled."""
    compression = CompressionConfig("taco", "int8h", **compression)
    config = dataclasses.replace(CONFIG, compression=compression, data_parallel=DataParallelConfig(gradients="none"))
    program = step.build(config, make_mesh(2, 1, 4))
    return dry_run._kernel_text(program, dry_run.trace(program))


def test_what_is_printed_is_what_the_messages_of_the_step_get(monkeypatch):
    """A choice may depend on the number of ranks and on sizes: it is asked for each message, as it is traced."""
    asked = []

    def choice(spec, device, force=None):
        asked.append(spec)
        return "jnp", f"{spec.operation} over {spec.geometry.messages if spec.geometry else 'unknown'} ranks"

    monkeypatch.setattr(dispatch, "choose_kernel", choice)
    text = kernels()
    assert "  taco         jnp (reduce): reduce over 4 ranks" in text and "unknown" not in text
    assert all(spec.geometry for spec in asked)
    asked.clear()
    assert "  taco         jax.lax: every message goes exactly" in kernels(min_bytes=1 << 40) and not asked


def test_a_backend_that_cannot_run_a_message_is_an_error_of_the_config(monkeypatch):
    def choice(spec, device, force=None):
        if spec.geometry is not None and spec.operation == "reduce":
            raise dispatch.KernelUnavailableError("4 ranks are too many")
        return "jnp", "a test"

    monkeypatch.setattr(dispatch, "choose_kernel", choice)
    with pytest.raises(ConfigError, match="compression: 4 ranks are too many"):
        kernels()


def test_from_what_size_messages_are_compressed(program, monkeypatch, tmp_path):
    line = lambda: dry_run._tuned_line(program, "taco", program.mesh.devices.flat[0])
    assert line() == "  taco         messages from 0 bytes, the default without a file of tuned values"
    file = tmp_path / "tuned.json"
    monkeypatch.setenv("TACO_JAX_TUNED", str(file))
    assert "messages from 0 bytes, the default: " in line() and "python -m taco_jax.tune measures it" in line()
    name = tuned.entry_name("cpu", 4)
    tuned.write(file, name, {"taco": tuned.Tuned(1 << 20, ((1, 1, "ring"),))})
    assert line() == f"  taco         messages from 1,048,576 bytes, tuned for {name} in {file}"
    sums = tuple((4**i, 1, "two_shot" if i in (2, 3) else "one_shot") for i in range(5))
    tuned.write(file, name, {"taco": tuned.Tuned(0, ((1, 1, "ring"),), sums)})
    assert line().endswith(f"in {file}; sums one_shot, two_shot from 16 bytes, one_shot from 256 bytes")
    tuned.write(file, name, {"taco": tuned.Tuned(None, ((1, 1, "all_to_all"),))})
    assert "no messages: compressing never paid, tuned for" in line()


@pytest.mark.parametrize("gigabytes, verdict", [(80.0, "fits 80 GB"), (1e-6, "does NOT fit 1e-06 GB")])
def test_verdict(program, gigabytes, verdict):
    assert verdict in dry_run._memory_text(dataclasses.replace(CONFIG, gpu_memory_gb=gigabytes), program)


@pytest.mark.slow
def test_chains_that_make_messages_too_small_are_named():
    # 4 sequences of 32 x 64 values of 2 bytes.
    def text(chains, least):
        compression = dataclasses.replace(CONFIG.compression, min_bytes=least)
        return dry_run.report(dataclasses.replace(CONFIG, chains=chains, compression=compression), make_mesh(2, 1, 4))

    line = "chains=2 cuts the layers' messages to 8,192 bytes, which go exactly; --chains 1 compresses them"
    assert line in text(2, 10_000)
    assert "cuts" not in text(1, 10_000) and "cuts" not in text(2, 8_192) and "cuts" not in text(2, 20_000)


def data_parallel(dp=4, devices_per_host=None, **settings):
    mesh = MeshConfig(dp=dp, devices_per_host=devices_per_host)
    config = dataclasses.replace(CONFIG, mesh=mesh, data_parallel=DataParallelConfig(**settings))
    p = step.build(config, make_mesh(dp))
    return p, "\n".join(dry_run._data_parallel_text(p)).splitlines()


AFTER = "  sent after the backward pass (--data-parallel.overlap sends each layer's beside the one before it)"


def test_what_data_parallel_ranks_send_and_hold():
    assert data_parallel(1, gradients="int8h", zero1=True)[1] == []
    assert data_parallel()[1] == [
        "data parallelism (dp 4)",
        "  gradients: int8h over 4 ranks, float32 sums",
        AFTER,
        "  optimiser state: whole on every rank (data_parallel.zero1 shares it out)",
    ]
    assert data_parallel(gradients="sdp4", devices_per_host=2, zero1=True, parameters="int6h")[1][1:] == [
        "  gradients: int8h inside hosts of 2 ranks, int4h between 2 hosts, float32 sums",
        "  sdp4: 2 hosts of 2 ranks (mesh.devices_per_host=2)",
        AFTER,
        "  optimiser state: in 4 shares, float32 master weights too",
        "  parameters: whole on every rank in bfloat16, changes sent in int6h",
    ]
    for parameters, dtype in (("none", "float32"), ("bfloat16", "bfloat16")):
        lines = data_parallel(gradients="sdp4", zero1=True, parameters=parameters)[1]
        assert lines[2] == "  sdp4: one host, so only the level inside (as JAX says)"
        assert lines[-1] == f"  parameters: whole on every rank in {dtype}, sent in {dtype}"
    lines = data_parallel(gradients="sdp4", devices_per_host=1)[1]
    assert lines[2] == "  sdp4: 4 hosts of 1 ranks, so only the level between hosts (mesh.devices_per_host=1)"


def test_levels_of_tensor_parallelism_are_listed():
    def text(tp, hosts, **compression):
        mesh = MeshConfig(tp=tp, devices_per_host=hosts)
        compression = CompressionConfig("taco", "int8h", **compression)
        p = step.build(dataclasses.replace(CONFIG, mesh=mesh, compression=compression), make_mesh(tp=tp))
        dry_run.trace(p)
        return p, "\n".join(dry_run._hosts_text(p)), dry_run._site_text(p)

    p, hosts, sites = text(4, 2, between_hosts="int4h")
    assert hosts.splitlines() == [
        "tensor parallelism (tp 4)",
        "  2 hosts of 2 ranks (mesh.devices_per_host=2)",
        "  messages: hierarchical, all: inside a host, between hosts and inside again, 1/2 as much between hosts",
    ]
    rows = [row for row in p.table.rows() if row.levels]
    for row in rows:
        name = rf"{row.site} +{row.direction} +psum +tp +{row.codec}"
        inside, between = (f"{row.bytes_of(level) / 1e6:.3f}" for level in ("inside", "between"))
        lines = rf"    inside a host, 2 ranks +{row.codec} +\d+ +{inside}\n    between 2 hosts +int4h +\d+ +{between}\n"
        assert re.search(rf"^  {name} .*\n{lines}", sites, re.M), (name, sites)
    inside, between = (sum(row.bytes_of(level) for row in rows) / 1e6 for level in ("inside", "between"))
    assert f"  of it in levels: {inside:.3f} MB inside hosts, {between:.3f} MB between hosts\n" in sites
    assert rows and inside + between == pytest.approx(p.table.total()[0] / 1e6)

    # Why nothing goes in levels does not hang on the messages: none is traced compressed.
    lines = lambda *args, **compression: text(*args, min_bytes=1 << 40, **compression)[1].splitlines()
    assert lines(4, None) == []
    assert lines(4, 2, algorithm="two_shot")[2].startswith(
        "  messages: flat, as configured; algorithm=hierarchical sends"
    )
    assert lines(4, None, algorithm="hierarchical")[1:] == [
        "  one host (as JAX says)", "  messages: flat: algorithm=hierarchical has levels only where tp spans hosts",
    ]  # fmt: skip
    assert lines(4, 1, between_hosts="int4h")[1:] == [
        "  4 hosts of 1 ranks (mesh.devices_per_host=1)",
        "  messages: flat, in int4h (compression.between_hosts): no host has two ranks of tp",
    ]


def test_bytes_over_dp_are_listed():
    p, _ = data_parallel(gradients="int8h", zero1=True, parameters="int4h")
    text = dry_run._site_text(p)
    for site, direction, codec in (("dp/grads/0", "backward", "int8h"), ("dp/params/0", "forward", "int4h")):
        assert re.search(rf"^  {site} +{direction} .* {codec} ", text, re.M), site
    for kind, what in (("gradient", "gradients over dp"), ("parameter", "parameters over dp")):
        sent, bf16 = p.table.total(kind)
        assert sent and f"  {what} {sent / 1e6:.3f} MB a step, {bf16 / sent:.3f}x less" in text
    assert p.table.total("activation") == (0, 0)


def test_what_positions_attend_to_is_said(tmp_path):
    token_writers.prepared(tmp_path, [[1, 10]], end=10)
    model = dataclasses.replace(CONFIG.model, sliding_window=8, attention_pattern="sf")
    data = dataclasses.replace(CONFIG.data, train=str(tmp_path), document_mask=True)
    config = dataclasses.replace(CONFIG, model=model, data=data)
    said = (
        "8 positions back in 1 of 2 layers, inside documents, which end with token 10 (by xla, which holds the scores"
    )
    assert dry_run._attention_text(step.build(config, make_mesh(2, 1, 4))) == [f"attention: {said} of all pairs)"]


def test_one_rank_sends_nothing():
    program = step.build(dataclasses.replace(CONFIG, mesh=MeshConfig()), make_mesh())
    dry_run.trace(program)
    assert "TP activation traffic: none (tp 1)" in dry_run._site_text(program)
