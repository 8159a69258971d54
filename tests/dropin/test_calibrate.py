"""`taco_jax.calibrated` and `run --calibrate`: exact results, and what codecs would lose of the real values."""

import ctypes
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading

import dropin_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropin_programs import UNFUSED, check_equal, fresh, mesh, sharded
from helpers import REPOSITORY, cpu_environment, run_python
from jax import lax
from jax.sharding import PartitionSpec as P
from meetings import free_port

import taco_jax
from taco_jax.codec import CODECS, as_codec
from taco_jax.compression import plan_file
from taco_jax.dropin import DropInError, compat, host_calls, observer
from taco_jax.dropin.allocation import Budget, Option, allocate
from taco_jax.dropin.hook import _hooks
from taco_jax.dropin.mesh_axes import Place
from taco_jax.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_stays_in_force():
    yield
    assert not (_hooks._used or _hooks._in_threads or _hooks._everywhere or host_calls._receivers)
    assert compat.context().value is None


# What is measured


def collectives(ranks, wanted=None):
    """(jit of a function with one result for each of several collectives over b, named by it; its argument).

    Terms of a sum have a part in common: the power of their sum is not the sum of their powers.
    """
    on = mesh(b=ranks)
    operations = {
        "all_reduce": lambda x: lax.psum(x, "b"),
        "reduce_scatter": lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True),
        "all_gather": lambda x: lax.all_gather(x, "b", tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "b", 0, 0, tiled=True),
        "collective_permute": lambda x: lax.ppermute(x, "b", [(n, (n + 1) % ranks) for n in range(ranks)]),
    }  # fmt: skip

    if wanted is not None:
        operations = {name: operations[name] for name in wanted}

    def local(x):
        ys = []
        for name, operation in operations.items():
            with jax.named_scope(name):
                # No function of what another one sends.
                ys.append(operation(jnp.sin(x * (1 + len(ys) / 7)) * jnp.exp(x / 2)))
        return ys

    f = jax.jit(fresh(jax.shard_map(local, mesh=on, in_specs=P("b"), out_specs=P("b"), check_vma=False)))
    common, own = (
        jax.random.normal(jax.random.key(0), (64, 512)),
        jax.random.normal(jax.random.key(1), (ranks, 64, 512)),
    )
    return f, sharded(on, (common + own).reshape(-1, 512), "b"), list(operations)


def rows_by_name(calibration, names):
    rows = {name: row for row in calibration.measured() for name in names if f"/{name}/" in row.op_name}
    assert sorted(rows) == sorted(names)
    return rows


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_snr_is_that_of_the_compressed_program(ranks, tmp_path):
    """And the elements and bytes are those of its report."""
    f, x, names = collectives(ranks)
    with taco_jax.calibrated(tmp_path / "plan.json", codecs=["int5h"], bits=8) as calibration:
        check_equal(f(x), f(x))
    rows = rows_by_name(calibration, names)
    exact = f(x)
    with taco_jax.compressed({"b": "int5h"}) as report:
        ours = f(x)
    for name, a, b in zip(names, exact, ours, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.sum((a - b) ** 2) / np.sum(a**2)
        measured, _ = rows[name].options
        assert abs(measured.snr + 10 * math.log10(error)) < 0.25, (name, measured.snr, error)
    before = {name: site.before for site in report.sites for name in names if f"/{name}/" in site.op_name}
    for name, row in rows.items():
        assert row.calls == 2 and row.sent == 2 * before[name] / 4 and row.operation == name and row.axis == "b"


def test_a_stack_forward_and_backward_is_exact_and_its_plan_is_taken(tmp_path):
    """A scanned body counts as often as it runs; sums of the slice that each device keeps are reduce-scatters."""
    on = mesh(data=1, tensor=4)
    args = programs.weights(on)
    f = programs.step(on)
    exact = f(*args)
    path = tmp_path / "plan.json"
    options = {"axes": ["tensor"], "codecs": ["int4h", "int6h"]}  # other tests have meshes over these devices
    with taco_jax.calibrated(path, bits=5.125, steps=1, **options) as calibration:
        check_equal(exact, f(*args))
        check_equal(exact, f(*args))
    check_equal(exact, f(*args))
    rows = calibration.rows()
    assert {(row.axis, row.direction) for row in rows} == {("tensor", "forward"), ("tensor", "backward")}
    samples = [len(run) for runs in calibration._runs.values() for run in runs.samples]
    assert samples == [4] * 2 * programs.LAYERS and all(row.calls == 2 * programs.LAYERS for row in rows)
    sent = sum(row.sent for row in rows)
    assert sum(row.sent * row.chosen.bits for row in rows) <= 5.125 * sent
    # The bits are enough for one of two.
    assert sorted(row.chosen.codec for row in rows) == ["int4h", "int6h"]
    assert "(budget: 5.125 bits)" in str(calibration)
    written = plan_file.read(path)
    assert [(line.axis, line.codec, line.elements) for line in written.collectives] == [
        (row.axis, row.chosen.codec, row.elements) for row in rows
    ]
    with taco_jax.compressed(path) as report:
        ours = f(*args)
    codecs = {(site.axes, site.op_name): site.codec for site in report.sites if site.named}
    assert codecs == {((row.axis,), row.op_name): row.chosen.codec for row in rows}
    assert "match no collective" not in str(report)
    programs.check_close(exact, ours, 0.3, 0.1)


def test_flax_modules_are_told_apart(tmp_path):
    """The plan names them by their own names."""
    from flax import linen as nn

    on = mesh(tensor=4)
    part = lambda *spec: nn.with_partitioning(nn.initializers.lecun_normal(), spec)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name, scale in (("quiet", 1.0), ("loud", 4.0)):
                h = nn.Dense(512, use_bias=False, kernel_init=part(None, "tensor"), name=f"{name}_up")(x)
                h = jnp.tanh(h) ** (1 if scale == 1 else 9)  # few of its values are large
                x = x + nn.Dense(256, use_bias=False, kernel_init=part("tensor", None), name=f"{name}_down")(h)
            return x

    model, x = Block(), jax.random.normal(jax.random.key(0), (64, 256))
    abstract = jax.eval_shape(model.init, jax.random.key(1), x)
    shardings = nn.get_sharding(abstract, on)
    variables = nn.unbox(jax.jit(model.init, out_shardings=shardings)(jax.random.key(1), x))
    x = sharded(on, x)
    f = jax.jit(fresh(lambda v, x: jax.grad(lambda v, x: (model.apply(v, x) ** 2).mean(), argnums=(0, 1))(v, x)))
    exact = f(variables, x)
    path = tmp_path / "plan.json"
    with taco_jax.calibrated(path, snr=25, axes=["tensor"], codecs=["int4h,block=32", "int6h"]) as calibration:
        check_equal(exact, f(variables, x))
    forward = {row.op_name: row for row in calibration.rows() if row.direction == "forward"}
    names = sorted(re.search(r"(quiet|loud)_down", name)[0] for name in forward)
    assert names == ["loud_down", "quiet_down"]
    for row in calibration.rows():
        assert row.chosen.snr >= 25 and all(o.snr < 25 for o in row.options if o.bits < row.chosen.bits)
    with taco_jax.compressed(path) as report:
        ours = f(variables, x)
    assert {site.op_name: site.codec for site in report.sites if site.compressed} == {
        row.op_name: row.chosen.codec for row in calibration.rows()
    }
    programs.check_close(exact, ours, 0.15)


def test_modules_as_cuda_gets_them(tmp_path):
    """Collectives stand alone and sums are not merged: results are the exact ones, and lines become one message."""
    on = mesh(tensor=4)

    def local(x, w):
        with jax.named_scope("q"):
            q = lax.psum(x @ w, "tensor")
        with jax.named_scope("k"):
            k = lax.psum(jnp.sin(x) @ w, "tensor")
        with jax.named_scope("own"):
            own = lax.dynamic_slice_in_dim(lax.psum(x * 2, "tensor"), lax.axis_index("tensor") * 16, 16, 0)
        return q + k, own

    specs = (P("tensor"), P("tensor")), (P(), P("tensor"))
    local = jax.shard_map(local, mesh=on, in_specs=specs[0], out_specs=specs[1])
    f = jax.jit(fresh(local), compiler_options=UNFUSED)
    args = [
        sharded(on, jax.random.normal(jax.random.key(n), (4 * rows, 512)), "tensor") for n, rows in ((0, 64), (1, 512))
    ]
    exact = f(*args)
    path = tmp_path / "plan.json"
    with taco_jax.calibrated(path, bits=7, codecs=["int6h", "int8h"]) as calibration:
        check_equal(exact, f(*args))
    codecs = {row.op_name.split("/")[-2]: row.chosen.codec for row in calibration.rows()}
    # The bits are enough for one of q and k, which become one message, and so have one codec.
    assert codecs == {"q": "int6h", "k": "int6h", "own": "int8h"}
    assert sorted((row.op_name.split("/")[-2], row.operation) for row in calibration.rows()) == [
        ("k", "all_reduce"), ("own", "reduce_scatter"), ("q", "all_reduce")
    ]  # fmt: skip
    with taco_jax.compressed(path) as report:
        programs.check_close(exact, f(*args), 0.05)
    assert sorted(site.operation for site in report.sites) == ["all_reduce", "reduce_scatter"]


def test_weights_and_small_messages(tmp_path):
    """Gathers of arguments are measured where their operation is named; small messages stay out."""
    on = mesh(fsdp=4)
    w, x = sharded(on, jax.random.normal(jax.random.key(0), (512, 512)), "fsdp"), jnp.ones((4, 512))
    local = lambda x, w: (lax.all_gather(w, "fsdp", tiled=True) @ x.T, lax.psum(x[0, :8] * w[0, 0], "fsdp"))
    f = jax.jit(fresh(jax.shard_map(local, mesh=on, in_specs=(P(), P("fsdp")), out_specs=P(), check_vma=False)))
    with pytest.raises(DropInError, match=r"^nothing was measured: it gathers an argument of the program \(weights\)"):
        with taco_jax.calibrated(tmp_path / "plan.json"):
            f(x, w)
    assert not (tmp_path / "plan.json").exists()
    with taco_jax.calibrated(tmp_path / "plan.json", axes=["fsdp/all_gather"], bits=8) as calibration:
        f(x, w)
    (row,) = calibration.rows()
    assert (row.operation, row.elements) == ("all_gather", 128 * 512)
    assert abs(row.kurtosis - 3) < 0.1  # of a normal distribution
    assert "not measured: all_reduce" in str(calibration)


def test_a_device_that_gives_no_values(tmp_path, monkeypatch):
    monkeypatch.setattr(host_calls, "PLATFORMS", ("gpu",))
    f, x, _ = collectives(2, ["all_reduce"])
    with pytest.raises(
        DropInError, match="^nothing was measured: on cpu no values can be had from a running program; "
    ):
        with taco_jax.calibrated(tmp_path / "plan.json", codecs=["int6h"], bits=8):
            f(x)


def test_values_that_are_zero_or_not_finite_are_left_out(tmp_path):
    f, x, names = collectives(4, ["all_reduce", "all_to_all"])
    bad, infinite = x.at[3, 5].set(jnp.nan), x.at[3, 5].set(400)  # its exponential is beyond float32
    with taco_jax.calibrated(tmp_path / "plan.json", codecs=["int6h"], bits=8) as calibration:
        for values in (bad, infinite, x, x * 0):
            f(values)
    alone = rows_by_name(calibration, names)
    with taco_jax.calibrated(tmp_path / "plan.json", codecs=["int6h"], bits=8, steps=1) as calibration:
        f(x)
    for name, row in rows_by_name(calibration, names).items():
        figures = lambda row: [row.kurtosis, *(option.error for option in row.options)]
        assert figures(alone[name]) == pytest.approx(figures(row), rel=1e-12) and alone[name].calls == 4
    with pytest.raises(DropInError, match="^nothing was measured: no program with collectives that can be compressed"):
        with taco_jax.calibrated(tmp_path / "plan.json", codecs=["int6h"], bits=8, steps=2):
            f(bad)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_very_small_and_very_large_values(scale):
    """Powers of such values are beyond float32."""
    place = Place(mesh(b=4), ("b",))
    observed = observer.Observed("all_gather", place, "float32", ((64, 512),), None, dimension=0, codecs=("int8h",))
    x = jax.random.normal(jax.random.key(0), (64, 512))
    words_of = jax.jit(lambda x: observer._words(observed, [x], None))
    samples = []
    for factor in (1.0, scale):
        words = np.asarray(words_of(x * factor))
        samples.append(observer.read(np.concatenate([np.array([1, 2, 3, 4], np.uint32), words])))
    one, other = samples
    assert one.program == "0000000100000002" and (one.site, one.partition) == (3, 4)
    np.testing.assert_allclose(other.noise / other.signal, one.noise / one.signal, rtol=0.02)
    np.testing.assert_allclose(other.fourth / other.second**2, one.fourth / one.second**2, rtol=1e-3)
    np.testing.assert_allclose(other.signal, one.signal * scale**2, rtol=1e-3)


def test_large_arrays_are_sampled_evenly(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (3, 5 << 12)).at[:, ::2].multiply(3)
    monkeypatch.setattr(observer, "SAMPLE", 3 << 13)
    sampled = observer._sampled(x)
    assert sampled.shape == (3, 2 << 12)
    check_equal(sampled, jnp.concatenate([x[:, :4096], x[:, 8192:12288]], axis=1))
    monkeypatch.setattr(observer, "SAMPLE", 3 << 14)
    assert observer._sampled(x) is x


DAILY = ("taco", "int6h", "mxfp4")
NIGHTLY = [name for name in CODECS if name not in (*DAILY, "none", "int8_token")]


@pytest.mark.parametrize("name", [*DAILY, *(pytest.param(name, marks=pytest.mark.slow) for name in NIGHTLY)])
def test_rounded_blocks_are_what_a_message_says(name):
    codec = as_codec(name)
    x = jax.random.normal(jax.random.key(0), (2, 5 * codec.block + 3)).at[0, 7].set(jnp.inf).at[1].multiply(1e-3)

    def both(x):
        z = codec.to_blocks(x)
        return codec.rounded_blocks(z), codec.decode_blocks(codec.encode_blocks(z)[0], z.shape[-2])

    ours, theirs = jax.jit(both)(x)
    np.testing.assert_array_equal(ours, theirs)


# How numbers leave


def test_what_a_receiver_raises_stays_inside():
    problems = len(host_calls.problems())
    found = []
    ends = [host_calls.receive(lambda words: 1 / 0), host_calls.receive(found.append)]
    f = jax.jit(lambda x: (host_calls.call(x.astype(jnp.uint32)), x + 1)[1])
    try:
        y = f(jnp.arange(5))
        host_calls.wait()
    finally:
        for end in ends:
            end()
    assert y.tolist() == [1, 2, 3, 4, 5] and not found
    assert host_calls.problems()[problems:] == ["ZeroDivisionError: division by zero"]
    f(jnp.arange(3)).block_until_ready()
    assert len(host_calls.problems()) == problems + 1


class Driver:
    """The functions of libcuda that are called, on memory of the host, with a thread for each stream's work."""

    def __init__(self):
        self.contexts, self.pinned, self.queue = [], [], []

    def cuStreamGetCtx(self, stream, context):
        context._obj.value = stream.value + 1
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.contexts.pop()
        return 0

    def cuMemHostAlloc(self, address, size, flags):
        assert self.contexts == [78] and flags.value == 1
        self.pinned.append(ctypes.create_string_buffer(size.value))
        address._obj.value = ctypes.addressof(self.pinned[-1])
        return 0

    def cuMemcpyDtoHAsync_v2(self, to, source, size, stream):
        assert stream.value == 77
        self.queue.append(lambda: ctypes.memmove(to.value, source.value, size.value))
        return 0

    def cuLaunchHostFunc(self, stream, function, data):
        self.queue.append(lambda: function(data))
        return 0

    def run(self):
        """The stream gets to what it was given."""
        queue, self.queue = self.queue, []
        thread = threading.Thread(target=lambda: [work() for work in queue])
        thread.start()
        thread.join()


def frame_of(words, get_stream):
    """(a call's frame as XLA makes it for uint32 words, what must outlive it)."""
    dims = (ctypes.c_int64 * 1)(len(words))
    buffer = host_calls._Buffer(0, None, host_calls.UINT32, words.ctypes.data, 1, dims)
    values = (ctypes.POINTER(host_calls._Buffer) * 1)(ctypes.pointer(buffer))
    api = host_calls._Api()
    api.functions[host_calls.STREAM_GET] = ctypes.cast(get_stream, ctypes.c_void_p).value
    frame = host_calls._CallFrame(api=ctypes.pointer(api), context=5, stage=host_calls.EXECUTE)
    frame.arguments.size, frame.arguments.values = 1, values
    return frame, (dims, buffer, values, api)


def test_words_come_from_a_gpu_once_its_stream_gets_there(monkeypatch):
    """The values are not there yet when a call is launched; pinned memory is used again."""

    @host_calls._STREAM_FUNCTION
    def get_stream(arguments):
        assert arguments.contents.context == 5
        arguments.contents.stream = 77
        return None

    cuda = host_calls._Cuda.__new__(host_calls._Cuda)
    monkeypatch.setattr(host_calls.ctypes, "CDLL", lambda name: Driver())
    cuda.__init__()
    monkeypatch.setattr(host_calls, "_cuda", lambda: cuda)
    found, problems = [], len(host_calls.problems())
    end = host_calls.receive(found.append)
    try:
        for value in (3, 4):
            words = np.zeros(6, np.uint32)
            frame, kept = frame_of(words, get_stream)
            assert host_calls._on_cuda(ctypes.byref(frame)) is None
            words[:] = value
            assert len(found) == value - 3
            cuda._driver.run()
            assert found[-1].tolist() == 6 * [value] and kept
        assert len(cuda._driver.pinned) == 1 and not cuda._driver.contexts and not cuda._waiting
        assert len(host_calls.problems()) == problems
        cuda._driver.cuMemcpyDtoHAsync_v2 = lambda *args: 700
        assert host_calls._on_cuda(ctypes.byref(frame)) is None
        assert host_calls.problems()[problems:] == ["RuntimeError: cuMemcpyDtoHAsync_v2: the CUDA driver returns 700"]
    finally:
        end()


@pytest.mark.slow
def test_several_threads(tmp_path):
    """Programs of several threads are measured, each as often as it ran, and give the exact results."""
    on = mesh(b=4)
    x = sharded(on, jax.random.normal(jax.random.key(0), (256, 512)), "b")
    local = lambda n, x: lax.psum(x * n, "b")
    every = lambda n: jax.shard_map(functools.partial(local, n), mesh=on, in_specs=P("b"), out_specs=P())
    made = [(jax.jit(fresh(every(n))), x) for n in range(1, 4)]
    exact = [f(x) for f, x in made]
    results = [None] * len(made)
    with taco_jax.calibrated(tmp_path / "plan.json", codecs=["int6h"], bits=8) as calibration:

        def call(n):
            f, x = made[n]
            results[n] = [f(x) for _ in range(n + 1)][-1]

        threads = [threading.Thread(target=call, args=(n,)) for n in range(len(made))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for a, b in zip(exact, results):
        check_equal(a, b)
    assert sorted(row.calls for row in calibration.measured()) == [1, 2, 3]


# The choice


def every_choice(rows, bits):
    """The least error of all choices that keep the average."""
    total = sum(weight for weight, _ in rows)
    fits = [
        choice
        for choice in itertools.product(*(options for _, options in rows))
        if sum(w * o.bits for (w, _), o in zip(rows, choice)) <= bits * total
    ]
    return min(sum(w * o.error for (w, _), o in zip(rows, choice)) for choice in fits)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all(seed):
    """Never above the average; and no worse than the best choice of a thousandth less, for sizes are rounded."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(6):
        bits = [4.125, 5.125, 6.125, 8.125, 32.0]
        errors = [*sorted(10 ** random.uniform(-5, -1, 4), reverse=True), 0.0]
        rows.append((random.uniform(0.5, 1.5), [Option(str(b), b, e) for b, e in zip(bits, errors)]))
    total = sum(w for w, _ in rows)
    for bits in (4.9, 5.5, 7.0, 12.0, 32.0):
        chosen = allocate(Budget(bits), rows)
        assert sum(w * o.bits for (w, _), o in zip(rows, chosen)) <= bits * total * (1 + 1e-6)
        error = sum(w * o.error for (w, _), o in zip(rows, chosen))
        assert every_choice(rows, bits) <= error * (1 + 1e-9) <= every_choice(rows, 0.999 * bits) * (1 + 1e-8)
    assert all(o.error == 0 for o in allocate(Budget(32), rows))


def test_a_step_that_goes_over_two_costs_both():
    options = [Option("a", 4.0, 1.0), Option("b", 8.0, 0.5), Option("c", 9.0, 0.4)]
    chosen = lambda bits: allocate(Budget(bits), [(1.0, options)])[0].codec
    assert [chosen(bits) for bits in (4, 5.5, 8, 8.9, 9)] == ["a", "a", "b", "b", "c"]


def test_what_a_budget_leaves_is_used():
    """A codec that loses a little less for a few bits is taken where the next one is too large, though a mixture of
    its neighbours would lose less."""
    options = [Option("int4h", 4.125, 0.0245), Option("mxfp4", 4.25, 0.0229), Option("int5h", 5.125, 0.0054)]
    assert [allocate(Budget(bits), [(1.0, options)])[0].codec for bits in (4.2, 5, 5.2)] == ["int4h", "mxfp4", "int5h"]


def test_the_fewest_bits_that_reach_an_snr():
    options = [Option("a", 4.0, 1e-2), Option("b", 4.5, 1e-1), Option("c", 6.0, 1e-3), Option("none", 16.0, 0.0)]
    at = lambda snr: allocate(Budget(snr=snr), [(1.0, options)])[0].codec
    assert [at(snr) for snr in (5, 20, 21, 30, 31)] == ["a", "a", "c", "c", "none"]


@pytest.mark.parametrize(
    "options,line",
    [
        ({"bits": 3}, "bits=3: the codecs that are tried need 4.125 at least (int4h); give more bits, or codecs of"),
        ({"bits": 0}, "bits=0: must be a number of bits an element, above 0 and at most 32"),
        ({"bits": 4.5, "snr": 20}, "bits=4.5 with snr=20: give one of them"),
        ({"snr": float("nan")}, "snr=nan: must be a number of dB, above 0 and at most 200"),
        ({"steps": 0}, "steps=0: must be an integer of 1 or more"),
        ({"codecs": ["int4h", "none"]}, "codecs: 'none': sends exactly; take such as mxfp4, int4h"),
        ({"codecs": ["int8_token"]}, "codecs: 'int8_token': has one scale a token, which arrays do not show; take"),
        ({"codecs": ["int4"]}, "codecs: compression='int4' is unknown: did you mean 'int4h'"),
        ({"codecs": ["int8h,rounding=stochastic"]}, "codecs: rounding='stochastic' needs a new key at every step"),
        ({"codecs": ["int8h", "int8h"]}, "codecs: 'int8h': is given twice; name each once"),
        ({"codecs": []}, "codecs: names none; take such as mxfp4"),
        ({"axes": []}, "axes: names none; must be mesh axes, such as tensor"),
        ({"axes": ["a+a"]}, "axes: 'a+a': names an axis twice"),
        ({"axes": ["fsdp/gather"]}, "axes: 'fsdp/gather': 'gather' is no operation; did you mean 'all_gather'?"),
        ({"min_bytes": -1}, "min_bytes=-1: must be an integer of 0 or more bytes"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options, line, tmp_path):
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}") as error:
        with taco_jax.calibrated(tmp_path / "plan.json", **options):
            raise AssertionError
    assert "\n" not in str(error.value)


# The command


PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
random = lambda key, shape: jax.random.normal(jax.random.key(key), shape)
put = lambda key, shape, *spec: jax.device_put(random(key, shape), NamedSharding(mesh, P(*spec)))
x, w = put(0, (256, 1024), None, "tensor"), put(1, (1024, 512), "tensor")
f = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P()))
for _ in range(6):
    y = f(x, w)
print("sum", float(y.sum()).hex(), float((y * y).sum()).hex(), sys.argv[1:])
if "fails" in sys.argv:
    raise SystemExit(7)
"""


def test_a_script_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(PROGRAM)
    run = lambda *args, **options: run_python(args, devices=4, cwd=tmp_path, **options)
    monkeypatch.setattr(sys, "argv", ["script.py", "a"])
    exec(PROGRAM, {})  # what a process of its own prints too
    exact = capsys.readouterr().out
    command = (
        "-m",
        "taco_jax.run",
        "--calibrate",
        "plan.json",
        "--snr",
        "30",
        "--axes",
        "tensor",
        "--calibrate-steps",
        "2",
    )
    measured = run(*command, "--", "script.py", "a")
    assert measured.stdout == exact
    head, row, last = measured.stderr.splitlines()[-3:]
    assert head.split()[:3] == ["elements", "calls", "share"] and head.endswith("operation, op_name")
    assert row.split()[:4] == ["131,072", "6", "100.0%", "int8h"] and "all_reduce jit(matmul)/" in row
    assert "(budget: 30 dB)" in last and last.endswith("4 of 4 devices measured")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["made"]["command"].startswith("python -m taco_jax.run --calibrate plan.json --snr 30")
    assert [(line["axis"], line["codec"]) for line in plan["collectives"]] == [("tensor", "int8h")]


@pytest.mark.slow
def test_a_program_from_the_persistent_cache_is_measured(tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_LOG_COMPILES": "1",
    }  # fmt: skip
    run = lambda *args: run_python([*args, "script.py"], devices=4, cwd=tmp_path, env=environment)
    command = ("-m", "taco_jax.run", "--calibrate", "plan.json", "--")
    exact, first, second = run(), run(*command), run(*command)
    assert exact.stdout == first.stdout == second.stdout
    hit = "Persistent compilation cache hit for 'jit_matmul'"
    assert [hit in result.stderr for result in (exact, first, second)] == [False, False, True]
    assert first.stderr.splitlines()[-2:] == second.stderr.splitlines()[-2:]


@pytest.mark.slow
def test_two_processes(tmp_path, capsys):
    """Each measures its own devices; the file is the first's. A plan says the same in both."""
    import calibrate_process

    port, path = free_port(), tmp_path / "plan.json"
    support = REPOSITORY / "tests" / "support"
    environment = os.environ | cpu_environment(devices=4)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (REPOSITORY, support)))
    command = lambda n: [sys.executable, support / "calibrate_process.py", *map(str, (port, n, 2, path))]
    running = [
        subprocess.Popen(command(n), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    found = [json.loads(out.partition("JSON ")[2]) for out, _ in outputs if "JSON " in out]
    assert len(found) == 2, outputs
    assert "on 4 of 8 devices" in plan_file.read(path).made["data"]
    calibrate_process.main(0, 0, 1, str(tmp_path / "alone.json"))
    alone = json.loads(capsys.readouterr().out.partition("JSON ")[2])
    for each in found:
        assert [row[:4] for row in each["rows"]] == [row[:4] for row in alone["rows"]]
        np.testing.assert_allclose(each["figures"], alone["figures"], rtol=0.3)
        assert each["codecs"] == found[0]["codecs"]


@pytest.mark.slow
def test_a_program_that_fails_or_has_no_collectives(tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    (tmp_path / "alone.py").write_text("import jax; print(jax.jit(lambda x: x + 1)(1))")
    run = lambda *args, **options: run_python(
        ["-m", "taco_jax.run", "--calibrate", "plan.json", *args], devices=4, cwd=tmp_path, **options
    )
    assert "(budget: 4.5 bits)" in run("--", "script.py", "fails", check=7).stderr
    command = ["-m", "taco_jax.run", "--compress", "plan.json", "--require", "1", "--", "script.py"]
    assert "int4h    tensor" in run_python(command, devices=4, cwd=tmp_path).stderr
    last = run("--", "alone.py", check=1).stderr.splitlines()[-1]
    assert last.startswith("error: nothing was measured: no program with collectives was compiled")
    last = run("--axes", "tensr", "--", "script.py", check=1).stderr.splitlines()[-1]
    assert last == "error: nothing was measured: its axis or operation is not measured; the axes are tensor"


@pytest.mark.parametrize(
    "args,line",
    [
        (["--calibrate", "plan.json", "--compress", "a=int8h"], "compress: with --calibrate the program runs exactly"),
        (["--calibrate", "plan.json", "--require", "0.5"], "require: with --calibrate the program runs exactly; leave"),
        (["--calibrate", "plan.txt"], "calibrate=plan.txt: must be the path of a plan file, such as plan.json"),
        (["--calibrate", "no/such/plan.json"], "calibrate=no/such/plan.json: must be a file in a folder that exists"),
        (["--calibrate", "plan.json", "--bits", "3"], "bits=3: the codecs that are tried need 4.125 at least (int4h)"),
        (["--calibrate", "plan.json", "--axes", "a,b/c"], "axes: 'b/c': 'c' is no operation; "),
        (
            ["--bits", "5", "--compress", "a=int8h"],
            "bits: is an option of --calibrate plan.json, which measures",
        ),
        (["--calibrate-steps", "5", "--compress", "a=int8h"], "calibrate-steps: is an option of --calibrate plan.json"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(args, line, tmp_path, monkeypatch, capsys):
    from taco_jax.dropin.command import run

    (tmp_path / "script.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    assert run([*args, "--", "script.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1
