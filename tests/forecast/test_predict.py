"""Times of a step and of a prompt, against sums that are written out here; and what must hold of any forecast."""

import dataclasses

import pytest

from taco_jax.config import CompressionConfig, ConfigError, DataConfig, MeshConfig, TrainConfig
from taco_jax.forecast import advice, cost, hardware, links, messages, predict, record, scale, work
from taco_jax.forecast.constants import load
from taco_jax.forecast.cost import Machine
from taco_jax.models.presets import preset

H200 = hardware.gpu("H200")
SEVEN = TrainConfig(
    model=preset("qwen2p5_7b"),
    mesh=MeshConfig(tp=4),
    data=DataConfig(sequence_length=2048),
    global_batch=8,
    remat="full",
    chains=1,
)


def machine(link="host", gpu=H200, devices=4, **more):
    return Machine(gpu, links.parse(link, gpu), devices, **more)


def one_clock(constants):
    """Products take as long as alone: no limit of power, no GPU slower than others."""
    constants("power", slower=[1.0] * len(load()["power"]["slower"]))
    constants("slowest", longer=0.0)


@pytest.fixture
def constants(monkeypatch):
    """set(group, **constants) for one test."""

    def change(group, **values):
        for key, value in values.items():
            monkeypatch.setitem(load()[group], key, value)
        cost._product.cache_clear()

    yield change
    cost._product.cache_clear()


def test_a_product_is_waves_of_tiles(constants):
    shape = {"tiles": [[128, 256]], "splits": [1], "k0": 100.0, "load": 8.0, "memory": 0.25, "start_us": 3.0}
    constants("product", share_of_peak=0.5, **shape)
    constants("start", us=2.0)
    # 16,384 x 3,584 in tiles of 128 x 256 are 1,792, 14 rounds on 132 multiprocessors.
    per_tile = (4736 + 100) * 2 * 128 * 256 + 8 * 4736 * (128 + 256)
    moved = 2 * (16384 * 4736 + 4736 * 3584 + 16384 * 3584) / machine().bandwidth
    seconds = 5e-6 + 14 * per_tile / (0.5 * 989.4e12 / 132) + 0.25 * moved
    assert machine().product(16384, 3584, 4736) == pytest.approx(seconds)
    # 512 x 256 are four tiles: in four parts of k each takes a quarter, and four float32 matrices are added up.
    constants("product", splits=[1, 4])
    per_part = (4096 + 100) * 2 * 128 * 256 + 8 * 4096 * (128 + 256)
    parts = 2 * 4 * 4 * 512 * 256 / machine().bandwidth
    moved = 2 * (512 * 16384 + 16384 * 256 + 512 * 256) / machine().bandwidth
    seconds = 5e-6 + per_part / (0.5 * 989.4e12 / 132) + parts + 0.25 * moved
    assert machine().product(512, 256, 16384) == pytest.approx(seconds)


def test_products_take_as_long_as_they_took():
    """Rows that no constant is fitted on: products with the limit of power, alone (experiments/results/product_h200,
    medians of calls in turn with other kernels)."""
    on = machine()
    for k, us in ((896, 189), (1152, 230), (4736, 796), (9472, 1600)):
        seconds = on.product(16384, 3584, k)
        seconds *= on.limit_of_power(2.0 * 16384 * 3584 * k, seconds)
        assert seconds == pytest.approx(us * 1e-6, rel=0.15), k


def test_products_are_slower_where_much_of_the_time_is_multiplication(constants):
    constants("power", activity=[0.3, 0.5, 0.7], slower=[1.0, 1.1, 1.3])
    on = machine()
    at = lambda activity: on.limit_of_power(activity * H200.flops, 1.0)
    assert [at(0.1), at(0.4), at(0.5), at(0.6), at(0.9)] == pytest.approx([1.0, 1.05, 1.1, 1.2, 1.3])
    slow = predict.step(SEVEN, on, "free")
    constants("power", slower=[1.0, 1.0, 1.0])
    free = predict.step(SEVEN, on, "free")
    assert slow.total("memory") == free.total("memory")
    assert 1.1 < slow.total("products") / free.total("products") < 1.3
    constants("power", slower=[1.0, 1.1, 1.3])
    # Waiting for messages leaves the clocks as they are.
    waiting = predict.step(SEVEN, machine("12GB/s,15us"), "none")
    assert waiting.total("products") == pytest.approx(free.total("products"))


def test_products_wait_for_the_slowest_gpu(constants):
    """The largest of n normal values: 0.564, 1.029 and 1.424 standard deviations above the mean for 2, 4 and 8."""
    one_clock(constants)
    before = {tp: predict.step(_on(tp), machine(devices=tp), "none") for tp in (1, 2, 4)}
    constants("slowest", longer=0.02)
    on = machine()
    assert [on.slowest(n) for n in (1, 2)] == pytest.approx([1.0, 1.02])
    assert [(on.slowest(n) - 1) / 0.02 for n in (4, 8)] == pytest.approx([1.029 / 0.564, 1.424 / 0.564], rel=0.04)
    for tp, then in before.items():
        now = predict.step(_on(tp), machine(devices=tp), "none")
        assert now.total("products") == pytest.approx(on.slowest(tp) * then.total("products"))
        assert now.total("memory") == then.total("memory")


def _on(tp):
    return dataclasses.replace(SEVEN, mesh=MeshConfig(tp=tp))


def test_a_product_of_one_row_is_bound_by_memory():
    read = 2 * 3584 * 152_064 / machine().bandwidth
    assert read < machine().product(1, 152_064, 3584) < 1.05 * read


def test_flops_of_a_step_are_those_of_the_formula():
    """PaLM's formula counts no recomputation, and attention's scores whole."""
    from taco_jax.train.metrics import flops_per_token

    shard, tokens = work.Shard(SEVEN.model, 1), 8 * 2048
    layer = [*work.layer_forward(shard, 8, 2048), *work.layer_backward(shard, 8, 2048)]
    of = lambda items, times: times * sum(2.0 * w.count * w.m * w.n * w.k for w in items if w.kind == "product")
    products = of(layer, 28) + of(work.head_loss(shard, tokens), 1)
    scores = 12 * 28 * 2048 * 28 * 128 * tokens
    assert products == pytest.approx(tokens * flops_per_token(SEVEN.model, 2048) - scores, rel=1e-3)
    kernels = 28 * sum(w.flops for w in layer if w.kind == "attention")
    # 2 + 5 products of half of the pairs, and the diagonal's tiles; the formula has 2 + 4 of all.
    assert kernels == pytest.approx(scores * 7 / 12 * (2048 + 128) / 2048, rel=1e-6)


def test_a_recomputation_has_no_product_whose_sum_was_kept(constants):
    one_clock(constants)
    shard = work.Shard(SEVEN.model, 4)
    again = [w for w in work.layer_forward(shard, 8, 2048, "again", sums=False) if w.kind == "product"]
    assert {w.site for w in again} == {work.QKV, work.UP}
    on = machine("nvlink")
    none, full = (
        predict.step(dataclasses.replace(SEVEN, remat=r), on, "free").total("products") for r in ("none", "full")
    )
    more = 28 * sum(on.product(w.m, w.n, w.k) for w in again)
    attention = 28 * on.seconds(work.attention(shard, 8, 2048, "again", fused=True)[0])
    assert full - none == pytest.approx(more + attention)


def test_parameters_are_those_of_the_model():
    from taco_jax.models.decoder import count_params

    for name in ("gpt2_124m", "qwen2p5_7b", "qwen3_0p6b"):
        model = preset(name)
        counted = work.Shard(model, 1).parameters(model.n_layers)
        assert counted == pytest.approx(count_params(model), rel=2e-3), name


def test_an_exact_step_on_a_given_link_by_hand():
    """Over 12 GB/s and 15 us each of the 114 sums of 117 MB takes a ring's time. As much of the two backward ones of a
    layer is hidden as they would take over NVLink; of the attention's, what casts of the mlp's weights take. What goes
    beside takes longer."""
    on = machine("12GB/s,15us")
    found = predict.step(SEVEN, on, "none")
    sum_ = 4 * 15e-6 + 2 * 3 / 4 * (16384 * 3584 * 2) / 12e9
    believed = links.exact_over_nvlink(4, 2 * 16384 * 3584)
    casts = 6 * 3 * 3584 * 4736 / on.bandwidth
    assert casts < believed
    beside = 28 * (2 * believed + casts)
    layers = sum(part.messages for site, part in found.sites.items() if site.startswith("layers/"))
    assert layers == pytest.approx(4 * 28 * sum_ - beside * (1 - on.beside), rel=1e-6)
    assert found.total("hidden") == pytest.approx(beside) and found.total("codec") == 0


def test_a_compressed_step_by_hand():
    on = machine("12GB/s,15us")
    found = predict.step(SEVEN, on, "int8h")
    start, wire = load()["links"]["start_us"] * 1e-6, 16384 * 3584 * (1 + 2 / 128)
    hops = 2 * (1.5 * 15e-6 + start + 3 / 4 * wire / 12e9)
    rates = {op: 1e9 * load()["codec"]["gb_s"]["H200"]["int8h"]["mosaic"][op] for op in ("encode", "decode", "reduce")}
    values = 2 * 16384 * 3584
    codec = (values + wire) / rates["encode"] + (values + wire) / rates["decode"] + 1.25 * wire / rates["reduce"]
    assert found.sites[work.DOWN].messages == pytest.approx(28 * hops, rel=1e-4)
    assert found.sites[work.DOWN].codec == pytest.approx(28 * codec, rel=1e-4)
    assert found.ratio == pytest.approx(16 / 8.125, rel=1e-3)


def test_free_is_below_all_and_codecs_cost_what_they_send():
    on = machine()
    times = [predict.step(SEVEN, on, c).seconds for c in ("free", "int4h", "int6h", "int8h", "none")]
    assert times == sorted(times)
    fast = machine("3000GB/s,1us")
    assert predict.step(SEVEN, fast, "int8h").seconds > predict.step(SEVEN, fast, "none").seconds


def test_small_messages_go_exactly():
    tiny = dataclasses.replace(SEVEN, global_batch=1, data=DataConfig(sequence_length=64))
    found = predict.step(tiny, machine(), "int8h")
    assert set(found.exactly) == {"embed", "head", work.QKV, work.OUT, work.UP, work.DOWN}
    assert found.seconds == pytest.approx(predict.step(tiny, machine(), "none").seconds)
    every = dataclasses.replace(tiny, compression=CompressionConfig(min_bytes=0))
    assert predict.step(every, machine(), "int8h").exactly == ()


def in_stages(kind, *, stages=4, microbatches=8):
    from taco_jax.config import PipelineConfig

    pipeline = PipelineConfig(schedule=kind, microbatches=microbatches)
    return dataclasses.replace(SEVEN, mesh=MeshConfig(pp=stages, tp=2), pipeline=pipeline, remat="none")


def test_empty_ticks_are_the_schedules_share(constants):
    from taco_jax.config import pipeline_schedule

    one_clock(constants)
    config = in_stages("gpipe")
    found = predict.step(config, machine(devices=8), "none")
    in_ticks = sum(p.seconds for s, p in found.sites.items() if s.startswith(("layers/", "pp/act")))
    assert found.bubble / (found.bubble + in_ticks) == pytest.approx(pipeline_schedule(config).bubble)


@pytest.mark.parametrize("stages,microbatches", [(2, 8), (4, 8), (4, 2), (4, 1)])
def test_ticks_of_1f1b_one_by_one(stages, microbatches, constants, monkeypatch):
    """The sum over ticks of the longest of what the stages do, the last one its head in the place of a forward pass."""
    kept = {}
    own = predict._bubble_of_1f1b

    def bubble(timer, schedule, forward):
        seconds = lambda *names: sum(p.seconds for s, p in timer.parts.items() if s.startswith(names))
        kept.update(forward=forward, layers=seconds("layers/", "pp/act", "embed"), head=seconds("head"))
        return own(timer, schedule, forward)

    monkeypatch.setattr(predict, "_bubble_of_1f1b", bubble)
    one_clock(constants)
    found = predict.step(in_stages("1f1b", stages=stages, microbatches=microbatches), machine(devices=8), "none")
    f, both, head = (kept[name] / microbatches for name in ("forward", "layers", "head"))
    back, total = both - f, 0.0
    assert 0 < head and 2 * f < both
    for tick in range(microbatches + 2 * (stages - 1)):
        does = []
        for stage in range(stages):
            forward, backward = tick - stage, tick - 2 * (stages - 1) + stage
            last = stage == stages - 1
            own_f = f * (0 <= forward < microbatches and not last)
            does.append(own_f + (back + head * last) * (0 <= backward < microbatches))
        total += max(does)
    names = ("layers/", "pp/act", "embed", "head")
    assert found.bubble + sum(p.seconds for s, p in found.sites.items() if s.startswith(names)) == pytest.approx(total)


def test_what_a_layer_keeps_is_moved():
    """Bytes of a layer of GPT-2, by hand, T tokens of D = 768, Q + 2K = 2,304 and F = 3,072 in bfloat16."""
    shard, t = work.Shard(preset("gpt2_124m"), 1), 4 * 1024
    d, qkv, q, f = 768, 2304, 768, 3072
    moved = lambda items: sum(w.bytes for w in items if w.kind in ("memory", "gelu"))
    forward = {r: moved(work.layer_forward(shard, 4, 1024, remat=r)) for r in ("full", "dots", "none")}
    assert forward["full"] == 2 * t * ((11 + 4) * d + 2 * qkv + 2 * f)
    assert forward["dots"] - forward["full"] == 2 * t * 2 * (qkv + f)
    assert forward["none"] == 2 * t * (49 * d + 4 * qkv + 4 * q + 6 * f)
    back = work.layer_backward(shard, 4, 1024, remat="dots")
    assert moved(back) == 2 * t * (16 * d + 2 * qkv + 5 * f)
    # Biases of q, k, v, of both results and of the mlp's first product; scale and bias of two norms, of float32 too.
    sums = [w for w in back if w.kind == "sum"]
    assert sum(w.bytes for w in sums) == 2 * t * (2 * 3 * d + qkv + 2 * d + f) and sum(w.kernels for w in sums) == 10
    kept = [work.kept(shard, t, "none", times) for times in (1, work.COPIED)]
    assert [{w.kind for w in items} for items in kept] == [{"zeros"}, {"memory"}]
    of_all = [sum(w.bytes for w in items) for items in kept]
    assert of_all == [2 * t * times * (14 * d + qkv + 2 * q + 2 * f) for times in (1, 2)]


def test_kernels_start(constants):
    one_clock(constants)
    constants("start", us=2.0, host_us=500.0)
    on = machine(devices=1)
    assert on.seconds(work.Work("x", "forward", "memory", bytes=0.0, kernels=7)) == pytest.approx(14e-6)
    constants("sum", us=20.0, share_of_copy=0.5)
    a_sum = work.Work("x", "dx", "sum", bytes=1e9, kernels=2)
    assert on.seconds(a_sum) == pytest.approx(40e-6 + 2e9 / on.bandwidth)
    constants("zeros", share_of_copy=0.4)
    assert on.seconds(work.Work("x", "dw", "zeros", bytes=1e9, kernels=0)) == pytest.approx(2.5e9 / on.bandwidth)
    constants("gelu", ps_per_value=2.0)
    gelu = work.Work("x", "forward", "gelu", bytes=4e9, values=1e9, kernels=0)
    assert on.seconds(gelu) == pytest.approx(2e-3) and on.seconds(dataclasses.replace(gelu, values=1)) < 1.1e-3
    short = predict.first_token(preset("qwen2p5_7b"), on, "none", tp=1, length=1)
    assert short.sites["host"].seconds == pytest.approx(500e-6)
    faster = dataclasses.replace(on, measured={"start_us": 1.0, "host_us": 100.0})
    found = predict.first_token(preset("qwen2p5_7b"), faster, "none", tp=1, length=1)
    # Of a layer: passes, caches, products, attention; the rows of the embedding and the head.
    kernels = 28 * (19 + 1 + 4 + 1) + 2
    assert short.seconds - found.seconds == pytest.approx(400e-6 + kernels * 1e-6)


def test_levels_send_less_between_hosts():
    """tp 8 on two hosts of four: each rank sends a quarter of the message to the other host, exactly and compressed."""
    h100 = hardware.gpu("H100")
    between = links.between("100Gb/s,10us")
    on = Machine(h100, links.parse("nvlink", h100), 8, 2, between, 1)
    assert on.spread("tp", {"dp": 1, "pp": 1, "tp": 8}) == (4, 2)
    n = 1 << 26
    message = messages.SiteMessage("", "forward", "psum", "tp", 8, n, 2, 1)
    # Four GPUs share one card.
    assert on.exact_seconds(message, 4, 2) == pytest.approx(2 * 10e-6 + 2 * n / 4 / (12.5e9 / 4), rel=0.01)
    coded = dataclasses.replace(message, codec=messages.as_codec("int8h"))
    wire = on.compressed_seconds(coded, 4, 2)[1]
    inside = 2 * on.link.send(4, 3 / 4 * coded.codec.wire_bytes(n))
    assert wire - inside == pytest.approx(n * 1.015625 / 4 / (12.5e9 / 4), rel=0.01)
    rails = dataclasses.replace(on, rails=4)
    assert rails.exact_seconds(message, 4, 2) < on.exact_seconds(message, 4, 2) / 3


def test_the_dp_axis_is_on_one_host_where_it_fits():
    on = machine(devices=16, hosts=2, between=links.given("b", 12.5, 10.0))
    sizes = {"dp": 4, "pp": 2, "tp": 2}
    assert [on.spread(axis, sizes) for axis in ("tp", "pp", "dp")] == [(2, 1), (2, 1), (2, 2)]


def test_first_token_of_one_gpu_sends_nothing_and_longer_prompts_take_longer():
    alone = machine(devices=1)
    model = preset("qwen2p5_7b")
    times = [predict.first_token(model, alone, "none", tp=1, length=n).seconds for n in (512, 2048, 8192)]
    assert times == sorted(times) and predict.first_token(model, alone, "none", tp=1, length=512).sent == 0
    fed, plain = (
        predict.first_token(model, machine(), "int4h", tp=4, length=4096, feedback=f).total("codec")
        for f in (True, False)
    )
    assert fed > plain
    with pytest.raises(ConfigError, match=r"--ttft 999999: the model's longest sequence has 131072 tokens"):
        predict.first_token(model, alone, "none", tp=1, length=999_999)


def test_the_speed_up_to_which_a_codec_pays_is_where_it_stops():
    forecast = lambda at, codecs: predict.step(SEVEN, at, codecs)
    most = advice.most_gb_s(forecast, machine(), "int8h")
    gain = lambda gb_s: (lambda m: forecast(m, "none").seconds / forecast(m, "int8h").seconds)(
        dataclasses.replace(machine(), link=machine().link.at(gb_s))
    )
    assert gain(0.97 * most) > advice.LEAST_GAIN > gain(1.03 * most)


def test_the_size_from_which_a_codec_pays_is_where_it_starts():
    on = machine("12GB/s,15us")
    message = messages.SiteMessage("", "forward", "psum", "tp", 4, 1, 2, 1, messages.as_codec("int8h"))
    least = advice.least_bytes(on, message, message.codec)
    at = lambda n: advice.pays(on, dataclasses.replace(message, elements=n // 2))
    assert at(least) and not at(least // 2)


def choice(codecs, speedup, change):
    loss = None if change is None else record.Loss(change, None, 1, "")
    return advice.Choice(codecs, predict.Forecast(codecs, {}), speedup, loss)


@pytest.mark.parametrize(
    "given, best",
    [
        ([("a", 1.5, 0.004), ("b", 1.8, 0.02)], "a"),  # the fastest loses too much
        ([("a", 1.5, 0.004), ("b", 1.505, 0.001)], "b"),
        ([("a", 1.505, 0.004), ("b", 1.5, 0.001)], "b"),  # about as fast
        ([("a", 1.9, None), ("b", 1.5, 0.001)], "b"),  # without a record
        ([("a", 1.01, 0.0)], None),
        ([], None),
    ],
)
def test_the_recommendation(given, best):
    found = advice.choose([choice(*g) for g in given], 0.005)
    assert (found and found.codecs) == best


@pytest.mark.parametrize(
    "codecs, change, error, said",
    [
        ("int8h", 0.001, 0.001, ""),
        ("int8h:int8h", 0.001, 0.001, ""),
        ("int6h", 0.004, 0.002, "; that of int6h is 0.60 %"),
        ("int4h", 0.004, None, "; int4h has one run"),
        ("taco", 0.001, 0.001, "; taco is faster here, with more bytes or a larger change"),
        (None, None, None, ": it looks at no link; name none"),
    ],
)
def test_another_recommendation_than_that_of_auto_is_explained(codecs, change, error, said):
    found = None
    if codecs is not None:
        found = dataclasses.replace(choice(codecs, 1.5, change), loss=record.Loss(change, error, 3, ""))
    text = advice.against_auto(found, "training")
    if not said:
        assert text == ""
        return
    assert text.startswith("\nauto takes int8h") and "with its standard error is within 0.5 %" in text
    assert text.endswith(said)


def test_the_record_is_that_of_the_use():
    assert record.of("int6h", "training").runs == 3 and record.of("int6h", "training").sure
    assert record.of("int4h:int4h", "training") == record.of("int4h", "training")
    assert record.of("taco:int8h", "training") is None
    fed, plain = (record.of("int4h", "first_token", feedback=f).change for f in (True, False))
    assert fed < plain / 5


def test_scale_takes_the_fastest_layout_that_fits():
    gpu = hardware.gpu("H100")
    inside, between = links.parse("nvlink", gpu), links.between("100Gb/s,10us")
    config = dataclasses.replace(SEVEN, mesh=MeshConfig(), global_batch=1)
    points = scale.study(config, gpu, inside, between, gpus=[8, 64], rails=8, ways=("none", "int4h"))
    assert [(p.gpus, p.way) for p in points] == [(8, "none"), (8, "int4h"), (64, "none"), (64, "int4h")]
    assert all(p.dp * p.pp * p.tp == p.gpus for p in points)
    laid = list(scale.layouts(config, gpu, 8, 1, 8))
    assert all(scale.memory_bytes(c) <= 0.9 * 80e9 for c in laid)
    # Alone a GPU cannot hold 7.6e9 weights with their moments.
    assert not list(scale.layouts(config, gpu, 1, 1, 8))
    assert scale.stops(points, "int4h") == (8, 64)


@pytest.mark.parametrize("text", ["8-64", "0..8", "64..8", "8..", "a..b", "8..99999999"])
def test_wrong_ranges_are_one_line(text):
    with pytest.raises(ConfigError, match=r"--scale '.*': must"):
        scale.counts(text)
