"""`taco_jax.calibrated`: exact results, and what codecs would lose of the real values."""

import functools
import math
import re
import threading

import dropin_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropin_programs import UNFUSED, check_equal, fresh, mesh, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax.codec import CODECS, as_codec
from taco_jax.compression import plan_file
from taco_jax.dropin import DropInError, host_calls, observer
from taco_jax.dropin.mesh_axes import Place
from taco_jax.errors import ConfigError

pytestmark = pytest.mark.usefixtures("nothing_stays_in_force")


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
