"""What goes beside what: layers in chains, prompts in them, and sums that copy engines bring; how many chains there
are, as the trainer and inference say."""

import dataclasses
import types

import numpy as np
import pytest

from pallas_kernels.nvlink import hardware as driver
from taco_jax.compression import tuned
from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    LoraConfig,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
    cli,
)
from taco_jax.config import chains as of_trainer
from taco_jax.config.checks import check
from taco_jax.forecast import command, hardware, links, overlap, predict, report, work
from taco_jax.forecast.constants import load
from taco_jax.forecast.cost import Machine
from taco_jax.forecast.overlap import Load, Step, Sums
from taco_jax.inference.settings import Settings
from taco_jax.models.presets import preset
from taco_jax.train import links as of_sums

H200 = hardware.gpu("H200")
SEVEN = TrainConfig(
    model=dataclasses.replace(preset("qwen2p5_7b"), n_layers=6),
    mesh=MeshConfig(tp=2),
    data=DataConfig(sequence_length=2048),
    global_batch=8,
    remat="full",
    compression=CompressionConfig("int8h", "int8h"),
)


def machine(link="host", gpu=H200, devices=2, **more):
    return Machine(gpu, links.parse(link, gpu), devices, **more)


def one_clock(monkeypatch):
    monkeypatch.setitem(load()["power"], "slower", [1.0] * len(load()["power"]["slower"]))
    monkeypatch.setitem(load()["slowest"], "longer", 0.0)


class TrainerOn:
    """The trainer's own answers on such GPUs, whose driver and environment say whether there is NVLink."""

    def __init__(self, monkeypatch, nvlink: bool, devices: int = 2):
        reason = None if nvlink else "NCCL_P2P_DISABLE asks for a link without peer memory"
        monkeypatch.setattr(driver, "missing", lambda *_: reason)
        monkeypatch.setattr(of_sums.nvlink, "why_device_unsupported", lambda device: reason)
        monkeypatch.setenv(tuned.VARIABLE, "")
        self.device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
        self.mesh = types.SimpleNamespace(devices=np.array([self.device] * devices))

    def chains(self, config):
        return of_trainer(config, self.device)

    def why_not_copied(self, config):
        return of_sums.why_not_copied(config, self.mesh)

    def prompt_chains(self, model, **settings):
        batch, length = settings.pop("batch"), settings.pop("length")
        return Settings(**settings).layout(model, self.device, decoding=False).chains_of(model, batch, length)


CASES = {
    "as it is": {},
    "asked for": {"chains": 2},
    "one asked for": {"chains": 1},
    "odd": {"global_batch": 7},
    "cut sequences": {"remat": "none"},
    "small": {"data": DataConfig(sequence_length=128)},
    "large from": {"compression": CompressionConfig("int8h", "int8h", min_bytes=128 << 20)},
    "exact": {"compression": CompressionConfig("none", "none", min_bytes=128 << 20)},
    "in products": {"compression": CompressionConfig("int8h", "int8h", with_product=True)},
    "errors back": {"compression": CompressionConfig("int4h", "int4h", backward_error_feedback=True)},
    "stages": {"mesh": MeshConfig(tp=2, pp=2), "sequence_parallel": False},
    "accumulated": {"accumulation": 4},
    "four ranks": {"mesh": MeshConfig(tp=4)},
    "two replicas": {"mesh": MeshConfig(dp=2, tp=2)},
    "adapters": {"lora": LoraConfig(rank=8)},
    "small gradients": {"data": DataConfig(sequence_length=256)},
}


@pytest.mark.parametrize("link", ["host", "nvlink"])
@pytest.mark.parametrize("name", CASES)
def test_chains_and_copies_are_the_trainers(name, link, monkeypatch):
    config = check(dataclasses.replace(SEVEN, **CASES[name]))
    trainer = TrainerOn(monkeypatch, link == "nvlink", config.mesh.size)
    on = machine(link, devices=config.mesh.size)
    count, why = predict.chains(config, on)
    asked, reason = trainer.chains(config)
    # The trainer knows why there is no NVLink, the forecast that none was named.
    own = reason.replace("NCCL_P2P_DISABLE asks for a link without peer memory", "host is no NVLink")
    assert (count, why) == (asked, own)
    copied, theirs = predict.why_not_copied(config, on), trainer.why_not_copied(config)
    assert (copied is None) == (theirs is None)
    if theirs is not None and "NCCL_P2P" not in theirs:
        assert copied == theirs


@pytest.mark.parametrize(
    "link, settings",
    [
        ("host", {"length": 8192}), ("nvlink", {"length": 8192}), ("host", {"length": 512}),
        ("host", {"length": 512, "batch": 4}), ("host", {"length": 8191, "batch": 3}),
        ("host", {"length": 131_071, "batch": 3}),
        ("host", {"length": 8192, "chains": 1}), ("nvlink", {"length": 256, "chains": 2}),
        ("host", {"length": 8192, "compression": "int4h", "least": 64 << 20}),
    ],
)  # fmt: skip
def test_chains_of_prompts_are_those_of_inference(link, settings, monkeypatch):
    from taco_jax.compression.compression import Compression
    from taco_jax.inference.compiled import bucket

    model = preset("qwen2p5_7b")
    trainer = TrainerOn(monkeypatch, link == "nvlink")
    given = {"batch": 1} | settings
    compression = Compression(given.pop("compression", "int8h"), min_bytes=given.pop("least", None))
    theirs = trainer.prompt_chains(
        model, compression=compression, tp=2, batch=given["batch"], length=bucket(given["length"], model.max_length),
        chains=given.get("chains"),
    )  # fmt: skip
    count, why = predict.prompt_chains(model, machine(link), 2, compression=compression, **given)
    assert count == theirs.count and why


def test_a_message_goes_beside_the_next_step():
    """Steps of 10, 20, 30 and 40 us, messages of 25 and 15 us after each: by hand."""
    us = lambda *values: tuple(Load(0.0, v * 1e-6) for v in values)
    steps = [Step("a", us(10)), Step("a", us(20)), Step("m", us(30)), Step("m", us(40))]
    sums = {site: Sums((t * 1e-6,), 0.0, calls=6.0, longer=0.0) for site, t in (("a", 25), ("m", 15))}
    # Of six layers' messages: a beside 20 and 30, m beside 40; the last one beside nothing, or the next layer's 10.
    alone = overlap.settled(overlap.windows(steps, sums), spare=0.0, times=1.0)
    assert alone["a"] == pytest.approx((6 * 5e-6, 6 * 45e-6)) and alone["m"] == pytest.approx((6 * 15e-6, 6 * 15e-6))
    handed_on = overlap.settled(overlap.windows(steps, sums, alone=1.0, more=1.0), spare=0.0, times=1.0)
    assert handed_on["a"] == alone["a"]
    # Zeros before the first layer, and the last layer's sum beside nothing: seven messages for six.
    assert handed_on["m"] == pytest.approx((6 * 5e-6 + 15e-6, 6 * 15e-6 + 6 * 10e-6))
    # What may wait fills what is left of all messages but those of another pass.
    filled = overlap.settled(overlap.windows(steps, sums, filled=True), spare=60e-6, times=1.0)
    assert sum(seen for seen, _ in filled.values()) == pytest.approx(6 * 20e-6 - 60e-6)
    slowed = {site: dataclasses.replace(of_site, longer=0.1) for site, of_site in sums.items()}
    longer = overlap.settled(overlap.windows(steps, slowed), spare=0.0, times=1.0)
    assert longer["a"][0] == pytest.approx(6 * 5e-6 + 0.1 * 6 * 45e-6)


def test_a_hop_ends_in_the_middle_of_a_step_and_decoding_is_part_of_it():
    parts = (Load(10e-6, 2e-6), Load(4e-6, 0.0))
    steps = [Step("a", parts), Step("m", parts)]
    sums = {"a": Sums((20e-6, 20e-6), after=3e-6, calls=1.0, longer=0.0)}
    seen, hidden = overlap.settled(overlap.windows(steps, sums), spare=0.0, times=1.0)["a"]
    assert (seen, hidden) == pytest.approx((5e-6 + 16e-6, 15e-6 + 4e-6))
    # Products that are twice as long hide more.
    seen, _ = overlap.settled(overlap.windows(steps, sums), spare=0.0, times=2.0)["a"]
    assert seen == pytest.approx(0.0 + 12e-6)
    # Without a middle the second hop is beside nothing.
    whole = [Step("a", (Load(14e-6, 2e-6),)), Step("m", (Load(14e-6, 2e-6),))]
    seen, _ = overlap.settled(overlap.windows(whole, sums), spare=0.0, times=1.0)["a"]
    assert seen == pytest.approx(1e-6 + 20e-6)


def test_a_step_in_two_chains_by_hand(monkeypatch):
    """14 GB/s: a chain's message of int8h takes 2.2 ms, longer than the attention of the forward pass, and shorter than
    the mlp and than any step of the backward pass with products that may wait."""
    one_clock(monkeypatch)
    monkeypatch.setitem(load()["beside"], "over_host", 0.0)
    on = machine("14GB/s,15us")
    found = predict.step(SEVEN, on, "int8h")
    assert (found.chains, found.chains_why[:24]) == (2, "14GB/s,15us is no NVLink")
    n = 8192 * 3584
    wire = n * (1 + 2 / 128)
    hop = 1e-6 * (15 + load()["links"]["start_us"]) + wire / 14e9
    decode = (4 * n + wire) / (1e9 * load()["codec"]["gb_s"]["H200"]["int8h"]["mosaic"]["decode"])
    shard = work.Shard(SEVEN.model, 2)
    forward = work.of_chains(work.layer_forward(shard, 4, 2048, remat="full"), 2)
    seconds = lambda *sites: sum(on.seconds(w) for w in forward if w.site in sites)
    attention, mlp = seconds(work.QKV, work.OUT) + decode, seconds(work.UP, work.DOWN) + decode
    casts = 6 * 3 * 3584 * 9472 / on.bandwidth
    assert attention + casts < hop < mlp
    assert found.sites[work.OUT].messages == pytest.approx(6 * (hop - attention))
    # The last message of the last layer is beside nothing; zeros are sent before the first layer.
    of_last = 6 * (hop - attention - casts) + hop
    assert found.sites[work.DOWN].messages == pytest.approx(of_last)
    assert found.sites[work.DOWN].hidden == pytest.approx(13 * hop - of_last)
    assert found.sites[work.UP].messages == pytest.approx(0) and found.sites[work.UP].hidden == pytest.approx(12 * hop)
    before = found.seconds
    monkeypatch.setattr(overlap, "HANDED_ON", False)
    found = predict.step(SEVEN, on, "int8h")
    assert found.sites[work.DOWN].messages == pytest.approx(6 * hop) and found.seconds > before
    # XLA ran the second chain's first product before the first chain's message left.
    first = next(on.seconds(w) for w in forward if w.site == work.QKV and w.kind == "product")
    assert found.sites[work.OUT].messages == pytest.approx(6 * (hop - (attention - first)))


def test_work_of_chains_is_that_of_half_the_rows_and_weights_are_cast_once():
    on = machine()
    one, two = (predict.step(dataclasses.replace(SEVEN, chains=n), on, "free") for n in (1, 2))
    assert 1.0 < two.total("products") / one.total("products") < 1.06
    shard = work.Shard(SEVEN.model, 2)
    placed = lambda n: sum(w.bytes for w in work.layer_weights(shard, "full", chains=n))
    assert placed(2) - placed(1) == 2 * shard.layer_weights
    more = two.total("memory") - one.total("memory")
    assert 0 < more < 6 * 2.5 * shard.layer_weights / on.bandwidth + 6 * 100 * on.start


def test_products_beside_a_message_take_longer(monkeypatch):
    one_clock(monkeypatch)
    monkeypatch.setitem(load()["beside"], "over_host", 0.0)
    before = predict.step(SEVEN, machine(), "int8h")
    monkeypatch.setitem(load()["beside"], "over_host", 0.1)
    now = predict.step(SEVEN, machine(), "int8h")
    assert now.seconds - before.seconds == pytest.approx(0.1 * before.total("hidden"))
    assert machine("nvlink").beside == load()["beside"]["longer"]


def test_over_nvlink_there_is_one_chain_and_nothing_sent_has_one():
    nvlink, host = predict.step(SEVEN, machine("nvlink"), "int8h"), predict.step(SEVEN, machine(), "free")
    assert nvlink.chains == 1 and nvlink.chains_why.startswith("over NVLink")
    assert (host.chains, host.chains_why) == (1, "nothing is sent")
    assert predict.step(dataclasses.replace(SEVEN, chains=2), machine(), "free").chains == 2


def test_stages_and_cut_sequences_may_have_chains():
    pipeline = PipelineConfig(schedule="gpipe", microbatches=2)
    staged = dataclasses.replace(SEVEN, mesh=MeshConfig(tp=2, pp=2), pipeline=pipeline, sequence_parallel=False)
    cut = dataclasses.replace(SEVEN, sequence_parallel=True)
    for config in (staged, dataclasses.replace(staged, pipeline=PipelineConfig("1f1b", 2)), cut):
        on = machine(devices=config.mesh.size)
        one, two = (predict.step(dataclasses.replace(config, chains=n), on, "int8h") for n in (1, 2))
        assert two.total("hidden") > one.total("hidden") and two.total("messages") < one.total("messages")


def test_a_sequences_second_half_computes_attention_of_the_first_again(monkeypatch):
    one_clock(monkeypatch)
    on, model = machine(), preset("qwen2p5_7b")
    given = {"tp": 2, "length": 8192}
    one = predict.first_token(model, on, "int8h", chains=1, **given)
    halves = predict.first_token(model, on, "int8h", **given)
    batch = predict.first_token(model, on, "int8h", tp=2, length=4096, batch=2)
    assert [f.chains for f in (one, halves, batch)] == [1, 2, 2]
    shard = work.Shard(model, 2)
    attention = lambda length: on.seconds(work.attention(shard, 1, length, "forward", fused=True)[0])
    assert halves.sites[work.QKV].products - batch.sites[work.QKV].products == pytest.approx(
        28 * (attention(8192) - attention(4096))
    )
    # Both halves are there, and messages but one go beside them.
    assert halves.sites[work.DOWN].products == pytest.approx(batch.sites[work.DOWN].products)
    assert halves.seconds < one.seconds
    hop = on.link.send(2, 4096 * 3584 * (1 + 2 / 128))
    assert halves.sites[work.DOWN].messages + halves.sites[work.DOWN].hidden == pytest.approx(
        57 * hop + on.beside * halves.sites[work.DOWN].hidden
    )
    assert halves.total("codec") == pytest.approx(one.total("codec"), rel=0.01)


def test_errors_are_added_in_kernels_of_their_own():
    on, given = machine(), {"tp": 2, "length": 8192, "chains": 2}
    fed, plain = (
        predict.first_token(preset("qwen2p5_7b"), on, "int4h", feedback=f, **given).total("memory")
        for f in (True, False)
    )
    added = 28 * 4 * (3 * 2 * 4096 * 3584 / on.bandwidth + on.start)
    assert fed - plain == pytest.approx(added)


def test_copies_go_beside_products_of_weights():
    """Encoding and summing are seen, the copies are not; sums of the forward pass are one kernel each."""
    on = machine("nvlink")
    copied = predict.step(SEVEN, on, "int8h")
    kernel = dataclasses.replace(SEVEN, compression=CompressionConfig("int8h", "int8h", backward_link="auto"))
    found = predict.step(kernel, on, "int8h")
    assert copied.copied == "gradients' sums, beside the products of their weights"
    assert found.copied == "no sums (as configured)" and copied.seconds < found.seconds
    n = 16384 * 3584
    wire, rates = n * (1 + 2 / 128), load()["codec"]["gb_s"]["H200"]["int8h"]["mosaic"]
    at_both_ends = (2 * n + wire) / (1e9 * rates["encode"]) + (4 * n + wire) / (1e9 * rates["decode"])
    one_copy = 1e-6 * load()["copy"]["us"] + wire / (1e9 * load()["copy"]["gb_s"])
    part = copied.sites[work.UP]
    assert (part.codec, part.messages) == pytest.approx((6 * at_both_ends, 0.0))
    assert part.hidden == pytest.approx(6 * one_copy)
    # Nothing is beside the head's.
    assert copied.sites["head"].messages == pytest.approx(one_copy)
    assert copied.sites[work.OUT] == dataclasses.replace(
        found.sites[work.OUT], products=copied.sites[work.OUT].products
    )
    asked = dataclasses.replace(SEVEN, compression=CompressionConfig("int8h", "int8h", link="copy"))
    every = predict.step(asked, on, "int8h")
    assert every.copied == "sums (as configured)" and every.sites[work.DOWN].messages == pytest.approx(6 * one_copy)
    exact = predict.step(SEVEN, on, "none")
    assert exact.copied == "no sums (all go exactly)"


def test_gradients_of_a_layer_go_beside_another_layer(monkeypatch):
    """2 GB/s: a layer's message takes longer than the backward pass of a layer. Those of five go beside one each."""
    from taco_jax.config import DataParallelConfig

    one_clock(monkeypatch)
    monkeypatch.setitem(load()["beside"], "over_host", 0.0)
    given = DataParallelConfig(gradients="int8h", overlap=True)
    config = dataclasses.replace(SEVEN, mesh=MeshConfig(dp=2), chains=1, data_parallel=given)
    on = machine("2GB/s,15us")
    found, after = (
        predict.step(dataclasses.replace(config, data_parallel=dataclasses.replace(given, overlap=flag)), on)
        for flag in (True, False)
    )
    shard, part = work.Shard(SEVEN.model, 1), found.sites["dp/grads/layer"]
    hop = 1e-6 * (15 + load()["links"]["start_us"]) + shard.layer_weights * (1 + 2 / 128) / 2e9
    again = work.layer_forward(shard, 4, 2048, "again", sums=False)
    layer = sum(on.seconds(w) for w in [*again, *work.layer_backward(shard, 4, 2048)])
    assert layer < hop and part.hidden == pytest.approx(5 * layer)
    assert part.messages == pytest.approx(6 * hop - 5 * layer)
    assert "dp/grads/layer" not in after.sites and found.seconds < after.seconds
    assert found.sent == pytest.approx(after.sent)


@pytest.mark.parametrize(
    "flags, says",
    [
        ((), ("chains: 2 (host is no NVLink: messages of one travel beside", "copied: no sums (copies were measured")),
        (("--chains", "1"), ("chains: 1 (as configured)",)),
        (("--compression.min-bytes", "100000000"), ("chains: 2 (", " of exact", "chains: 1 (a chain's messages would")),
        (("--ttft", "8192"), ("chains: 2 (host is no NVLink",)),
        (("--ttft", "8192", "--chains", "1"), ("chains: 1 (as configured)",)),
        (("--mesh.tp", "1"), ()),
    ],
)
def test_the_report_says_how_many_chains_and_why(flags, says, tmp_path, capsys):
    from helpers import REPOSITORY

    file = tmp_path / "f.json"
    given = ("--config", str(REPOSITORY / "experiments/qwen7b.py"), "--gpu", "H200", "--link", "host")
    assert cli.run(command.main, [*given, *flags, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in says) and ("chains" in text) == bool(says)
    import json

    found = json.loads(file.read_text())
    assert f"chains: {found['exact']['chains']}" in text or not says
    assert found["ceiling"]["chains"] == 1 and ("tp" not in found["exact"]["chains_why"])
    for way in found["codecs"].values():
        assert not says or f"chains: {way['chains']} ({way['chains_why']})" in text


def test_ways_are_named_where_they_differ():
    forecast = lambda name, chains, copied: predict.Forecast(name, {}, chains=chains, chains_why="so", copied=copied)
    choices = [types.SimpleNamespace(codecs=c, forecast=forecast(c, n, "x")) for c, n in (("a", 2), ("b", 1))]
    lines = report.programs(forecast("none", 1, "y"), choices)
    assert lines == ["chains: 1 (so) of exact, b", "chains: 2 (so) of a", "copied: x"]
