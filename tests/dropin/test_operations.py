"""Each collective, in each form, over each axis: what is compressed, what stays exact, and why."""

import functools

import dropin_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropin_programs import UNFUSED, check_close, check_equal, mesh, run, sharded, share, u8_share
from hlo import counts, groups
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax.dropin import DropInError, merge_sums
from taco_jax.dropin.hlo_module import Module

AXES = ("a", "b", "c")
ROWS, COLUMNS = 128, 512


def manual(f, on, outs=1, **options):
    """jit of a function that every device runs on its own rows, with results of its own."""
    every = P(on.axis_names)
    specs = (every,) * outs if outs > 1 else every
    return jax.jit(
        programs.fresh(jax.shard_map(f, mesh=on, in_specs=every, out_specs=specs, check_vma=False)), **options
    )


def rows(on, dtype=jnp.float32, columns=COLUMNS):
    x = jax.random.normal(jax.random.key(1), (ROWS * on.size, columns)) * 8
    return sharded(on, x.astype(dtype), on.axis_names)


RING = [(i, (i + 1) % 4) for i in range(4)]
SENDS = {
    "all_reduce": lambda x, a: lax.psum(x, a),
    "reduce_scatter": lambda x, a: lax.psum_scatter(x, a, scatter_dimension=1, tiled=True),
    "all_gather": lambda x, a: lax.all_gather(x * 2, a, axis=1, tiled=True),
    "all_to_all": lambda x, a: lax.all_to_all(x, a, 0, 1, tiled=True),
    "collective_permute": lambda x, a: lax.ppermute(x, a, RING),
}


SLOW = pytest.mark.slow
AXES = {"inner": {"a": 2, "b": 4}, "outer": {"b": 4, "c": 2}, "alone": {"b": 4}}
# Each operation, and each place of the axis.
FEW = {("all_reduce", "outer"), ("all_gather", "inner"), ("reduce_scatter", "inner"), ("all_to_all", "outer")}
FEW |= {("collective_permute", "alone"), ("all_reduce", "alone")}


@pytest.mark.parametrize(
    "operation,place",
    [
        pytest.param(operation, place, marks=() if (operation, place) in FEW else SLOW)
        for operation in SENDS
        for place in AXES
    ],
)
def test_every_operation(operation, place):
    on = mesh(**AXES[place])
    x = rows(on)
    f = manual(functools.partial(SENDS[operation], a="b"), on)
    exact = f(x)
    compiled, ours, found = run(f, (x,), {"b": "int8h"})
    (site,) = found
    assert (site.operation, site.axes, site.codec, site.reason) == (operation, ("b",), "int8h", "")
    assert site.after < 0.3 * site.before
    check_close(exact, ours, 0.01)
    assert u8_share(compiled) == 1


@pytest.mark.parametrize(
    "operation,order",
    [
        ("all_gather", ("b", "a")), ("all_to_all", ("a", "b")), ("reduce_scatter", ("b", "a")),
        *(pytest.param(*case, marks=SLOW) for case in
          [("all_gather", ("a", "b")), ("all_to_all", ("b", "a")), ("reduce_scatter", ("a", "b"))]),
    ],
)  # fmt: skip
def test_two_axes_together_in_their_order(operation, order):
    on = mesh(a=2, b=4)
    x = rows(on, columns=1024)
    f = manual(functools.partial(SENDS[operation], a=order), on)
    _, ours, (site,) = run(f, (x,), {"a+b": "int8h"})
    assert site.axes == order and site.compressed
    check_close(f(x), ours, 0.01)


def test_sums_over_several_axes_are_named_together():
    """Also where another mesh has all of the devices along one axis."""
    on, other = mesh(a=2, b=4), mesh(all=8)
    x = rows(on)
    f = manual(lambda x: lax.psum(x, ("a", "b")) + lax.psum(x, "a"), on)
    _, ours, found = run(f, (x,), {"a": "int8h"})
    assert [s.reason for s in found if s.axes == ("a", "b")] == [
        "it goes over a and b at once; the plan would name them together, 'a+b'"
    ]
    for plan in ({"a+b": "int8h"}, {("b", "a"): "int8h"}):
        _, ours, found = run(f, (x,), plan)
        assert {(s.axes, s.compressed) for s in found} == {(("a", "b"), True), (("a",), False)}
        check_close(f(x), ours, 0.01)
    assert other.size == 8


@pytest.mark.parametrize("name,other", [("inner", "outer"), ("outer", "inner")])
def test_a_sum_of_the_compiler_over_one_axis_of_two(name, other):
    """The other axis is replicated, and as large: groups that are read wrongly are those of the other axis."""
    on = mesh(outer=2, inner=2)
    keys = jax.random.split(jax.random.key(4), 2)
    x = sharded(on, jax.random.normal(keys[0], (256, 256)), None, name)
    w = sharded(on, jax.random.normal(keys[1], (256, 256)), name)
    f = jax.jit(programs.fresh(jnp.matmul), out_shardings=NamedSharding(on, P()))
    _, ours, (site,) = run(f, (x, w), {name: "int8h"})
    assert site.axes == (name,) and site.compressed
    check_close(f(x, w), ours, 0.01)
    with pytest.raises(DropInError, match="nothing was compressed: the plan does not name it"):
        run(f, (x, w), {other: "int8h"})


def test_what_is_never_compressed():
    on = mesh(a=2, b=4)
    x = rows(on)

    f = manual(lambda x: (lax.psum(jnp.round(x).astype(jnp.int32), "b"), lax.pmax(x, "b"), lax.pmin(x, "b"),
                          lax.psum(x[:1, :64], "b"), lax.psum(x.astype(bool).astype(jnp.int8), "b"),
                          lax.psum(x.sum(), "b")[None], lax.psum(x, "b")), on, 7)  # fmt: skip
    exact = f(x)
    compiled, ours, found = run(f, (x,), {"b": "int8h"})
    check_equal(exact[:6], ours[:6])
    check_close(exact[6], ours[6], 0.01)
    reasons = {s.reason for s in found if not s.compressed}
    assert reasons >= {
        "its values are int32", "its reduction is maximum, not a sum", "its reduction is minimum, not a sum",
        "256 bytes, of which int8h would send no fewer", "a scalar",
    }  # fmt: skip
    assert [s.shape for s in found if s.compressed] == [(ROWS, COLUMNS)]


def test_min_bytes():
    on = mesh(b=4)
    x = rows(on)
    f = manual(lambda x: (lax.psum(x, "b"), lax.psum(x[:, :256] * 2, "b")), on, 2)
    small, large = x.nbytes // 8, x.nbytes // 4
    _, ours, found = run(f, (x,), {"b": "int8h"}, min_bytes=large)
    assert {s.reason for s in found} == {"", f"{small:,} bytes, below min_bytes={large:,}"}
    check_equal(f(x)[1], ours[1])
    check_close(f(x)[0], ours[0], 0.01)
    # A line's own stands over it.
    _, ours, found = run(f, (x,), {"b": taco_jax.Compression("int8h", min_bytes=0)}, min_bytes=large)
    assert share(found) == 1


def test_combined_sums():
    """XLA on CPU joins the sums of several arrays into one instruction."""
    on = mesh(a=2, b=4)
    x = rows(on, columns=256)
    f = manual(lambda x: lax.psum((x, x[:1, :8] * 2, jnp.sin(x), x[:2, :8] * 3), "a"), on, 4)
    exact = f(x)
    assert counts(f.lower(x).compile()) == {"all-reduce": 1}
    compiled, ours, found = run(f, (x,), {"a": "int8h"})
    assert sorted(s.compressed for s in found) == [False, False, True, True]
    # Those that are too small travel together, as before.
    assert [n for op, dtype, n, _ in groups(compiled) if op == "all-reduce"] == [3 * 8]
    check_equal(exact[1::2], ours[1::2])
    check_close(exact[::2], ours[::2], 0.01)
    # A plan of another axis leaves all as it is.
    with pytest.raises(DropInError, match="nothing was compressed: the plan does not name it"):
        with taco_jax.compressed({"b": "int8h"}):
            check_equal(exact, f(x))


def test_one_small_part_of_a_combined_sum():
    on = mesh(a=2, b=4)
    x = rows(on, columns=256)
    f = manual(lambda x: lax.psum((x, x[:1, :8] * 2), "a"), on, 2)
    exact = f(x)
    _, ours, found = run(f, (x,), {"a": "int8h"})
    assert sorted(s.compressed for s in found) == [False, True]
    check_equal(exact[1], ours[1])
    check_close(exact[0], ours[0], 0.01)


def test_layouts_are_those_of_the_program():
    on = mesh(b=4)
    x = rows(on)
    f = manual(lambda x: lax.all_gather(x * 2, "b", axis=1, tiled=True), on)
    assert "f32[128,2048]{0,1} all-gather(" in f.lower(x).compile().as_text()
    _, ours, found = run(f, (x,), {"b": "int8h"})
    assert share(found) == 1
    check_close(f(x), ours, 0.01)


# By operation, by op_name, by direction


def test_a_plan_by_operation():
    on = mesh(b=4)
    x = rows(on)
    f = manual(lambda x: (lax.psum(x, "b"), lax.all_gather(x * 2, "b", axis=1, tiled=True)), on, 2)
    for plan in ({"b": {"all_gather": "int8h"}}, {"b": {"all-gather": "int8h"}}, {"b": {"*": "int8h", "psum": "none"}}):
        _, ours, found = run(f, (x,), plan)
        assert {s.operation: s.compressed for s in found} == {"all_reduce": False, "all_gather": True}
        check_equal(f(x)[0], ours[0])


def test_a_plan_by_op_name():
    on = mesh(b=4)
    x = rows(on)

    def named(x):
        with jax.named_scope("layers/attention"):
            y = lax.psum(x, "b")
        with jax.named_scope("layers/mlp"):
            return y, lax.psum(jnp.sin(x), "b")

    f = manual(named, on, 2)
    _, _, found = run(f, (x,), {"b": {"*layers/mlp*": "int4h", "*": "int8h"}})
    assert {s.op_name.split("layers/")[1].split("/")[0]: s.codec for s in found} == {
        "attention": "int8h",
        "mlp": "int4h",
    }
    _, ours, found = run(f, (x,), {"b": {"all_reduce": {"*layers/mlp*": "int4h"}}})
    assert {s.codec: s.reason for s in found} == {"int4h": "", "none": "the plan does not name it"}
    check_equal(f(x)[0], ours[0])


def test_an_axis_that_the_mesh_has_with_one_device():
    on = mesh(a=1, b=4)
    x = rows(on)
    f = manual(lambda x: lax.psum(x, "b"), on)
    _, _, found = run(f, (x,), {"b+a": "int8h", "a": "int8h"})
    assert share(found) == 1 and found[0].axes == ("b",)


# As on CUDA, where the hook sees the program before it is fused


def grads_of_three(on):
    """The gradient by x of three products: a sum of three sums over tensor."""

    def f(x, *ws):
        return sum((jnp.tanh(x @ w) * n).sum() for n, w in enumerate(ws, 1))

    keys = jax.random.split(jax.random.key(2), 4)
    x = sharded(on, jax.random.normal(keys[0], (256, 512)), "data")
    ws = [sharded(on, jax.random.normal(k, (512, 512)) / 24, None, "tensor") for k in keys[1:]]
    return programs.fresh(jax.grad(f)), (x, *ws)


def test_sums_of_sums_are_one_message():
    on = mesh(data=2, tensor=4)
    f, args = grads_of_three(on)
    f = jax.jit(f, compiler_options=UNFUSED)
    assert counts(f.lower(*args).compile()) == {"all-reduce": 3}
    _, ours, found = run(f, args, {"tensor": "int8h"})
    assert len(found) == 1 and found[0].compressed
    check_close(f(*args), ours, 0.015)


def test_sums_of_sums_through_converts_and_reshapes():
    on = mesh(b=4)
    x = rows(on)

    def f(x):
        part = lambda y: lax.psum(y.astype(jnp.bfloat16), "b").astype(jnp.float32).reshape(2, ROWS // 2, COLUMNS)
        other = jnp.cos(x).reshape(2, ROWS // 2, COLUMNS)
        return part(x) + (other + part(jnp.sin(x) * 9)) + part(x * x)

    f = manual(f, on, compiler_options=UNFUSED)
    assert counts(f.lower(x).compile()) == {"all-reduce": 3}
    _, ours, found = run(f, (x,), {"b": "int8h"})
    assert len(found) == 1
    check_close(f(x), ours, 0.03)


def test_a_sum_that_others_read_is_not_merged():
    on = mesh(b=4)
    x = rows(on)

    def f(x):
        one, other = lax.psum(x, "b"), lax.psum(jnp.sin(x), "b")
        return one + other, one * 3

    f = manual(f, on, 2, compiler_options=UNFUSED)
    _, ours, found = run(f, (x,), {"b": "int8h"})
    assert len(found) == 2
    check_close(f(x), ours, 0.01)


def test_sums_over_different_axes_are_not_merged():
    on = mesh(a=2, b=4)
    x = rows(on)
    f = manual(lambda x: lax.psum(x, "a") + lax.psum(jnp.sin(x), "b"), on, compiler_options=UNFUSED)
    _, ours, found = run(f, (x,), {"a": "int8h", "b": "int8h"})
    assert len(found) == 2
    check_close(f(x), ours, 0.01)
    # Whatever the lines of the plan.
    (exact,) = f.lower(x).compile().runtime_executable().hlo_modules()
    assert merge_sums.merge(Module(exact.as_serialized_hlo_module_proto()), lambda c: 0, on.size, []) == 0


@pytest.mark.parametrize("options", [UNFUSED, None], ids=["unfused", "fused"])
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"tensor": 4, "data": 2}], ids=str)
def test_a_sum_of_which_each_device_keeps_its_part_is_a_reduce_scatter(axes, options):
    on = mesh(**axes)
    keys = jax.random.split(jax.random.key(3), 2)
    x = sharded(on, jax.random.normal(keys[0], (256, 512)), "data", "tensor")
    w = sharded(on, jax.random.normal(keys[1], (512, 512)) / 24, "tensor")
    where = NamedSharding(on, P("data", "tensor"))
    f = jax.jit(programs.fresh(lambda x, w: x @ w), out_shardings=where, compiler_options=options)
    assert counts(f.lower(x, w).compile()) == {"all-reduce": 1}
    compiled, ours, (site,) = run(f, (x, w), {"tensor": {"reduce_scatter": "int8h"}})
    assert site.operation == "reduce_scatter" and site.compressed
    assert counts(compiled).keys() == {"all-to-all"} and u8_share(compiled) == 1
    check_close(f(x, w), ours, 0.01)


def test_a_slice_of_another_part_is_no_reduce_scatter():
    on = mesh(b=4)
    x = rows(on)

    def f(x):
        other = 3 - lax.axis_index("b")
        return lax.dynamic_slice_in_dim(lax.psum(x, "b"), other * (COLUMNS // 4), COLUMNS // 4, 1)

    for options in (UNFUSED, None):
        g = manual(f, on, compiler_options=options)
        _, ours, (site,) = run(g, (x,), {"b": "int8h"})
        assert site.operation == "all_reduce"
        check_close(g(x), ours, 0.01)


def test_a_permutation_that_is_not_of_one_axis_stays_exact():
    # In an order of devices that no other test's mesh has, of which it could be an axis.
    on = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = rows(on)
    pairs = [(i, (i + 3) % 8) for i in range(8)]
    f = manual(lambda x: lax.ppermute(x, ("a", "b"), pairs) + lax.psum(x, "b"), on)
    _, ours, found = run(f, (x,), {"b": "int8h"})
    assert {s.operation: s.reason for s in found} == {
        "all_reduce": "", "collective_permute": "its groups are no axes of the program's meshes"
    }  # fmt: skip
    assert np.isfinite(np.asarray(ours)).all()
