"""Programs that are not ours, under a plan: values, gradients and bytes; without it, the program as it was."""

import functools
import warnings

import dropin_programs as programs
import jax
import jax.numpy as jnp
import pytest
from dropin_programs import check_close, check_equal, mesh, run, share, u8_share
from hlo import collectives, program
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax

PLAN = {"tensor": "int8h", "data": "int8h"}


@pytest.mark.parametrize("kind", ["remat", pytest.param("custom_vjp", marks=pytest.mark.slow)])
def test_values_gradients_and_bytes_through_scan(kind):
    on = mesh(data=2, tensor=4)
    args = programs.weights(on)
    f = programs.step(on, kind)
    compiled, ours, found = run(f, args, PLAN)
    check_close(f(*args), ours)
    assert u8_share(compiled) > 0.95 and share(found) > 0.999
    assert {s.direction for s in found if s.compressed} == {"forward", "backward"}
    # Bodies of scans count as often as they run.
    assert {s.runs for s in found if s.shape} == {programs.LAYERS}


@pytest.mark.parametrize(
    "codec,most,slope",
    [
        ("taco", 0.06, 0.02), ("e4m3h:int8h", 0.06, 0.02), pytest.param("int4h", 0.2, 0.05, marks=pytest.mark.slow),
        pytest.param("int8_token", 0.03, 0.02, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_codecs(codec, most, slope):
    on = mesh(data=2, tensor=4)
    args = programs.weights(on)
    f = programs.step(on)
    _, ours, found = run(f, args, {"tensor": codec})
    check_close(f(*args), ours, most, slope)
    forward, _, backward = codec.partition(":")
    codecs = {(s.direction, s.codec) for s in found if s.axes == ("tensor",)}
    assert codecs == {("forward", forward), ("backward", backward or forward)}


def test_the_same_function_before_inside_and_after():
    on = mesh(data=2, tensor=4)
    args = programs.weights(on)
    f = programs.step(on)
    before = program(f.lower(*args))
    first = f(*args)
    with taco_jax.compressed(PLAN) as report:
        inside = f(*args)
        again = f(*args)
    after = f(*args)
    assert report.programs == [f"jit_{f.__name__}"]
    check_equal(first, after)
    check_equal(inside, again)
    check_close(first, inside)
    assert program(f.lower(*args)) == before and not any(dtype == "uint8" for _, dtype, _ in collectives(before))


def test_blocks_of_equal_plans_share_programs_and_report():
    on = mesh(data=2, tensor=4)
    args = programs.weights(on)
    f = programs.step(on)
    with taco_jax.compressed({"tensor": "int6h"}) as first:
        one = f(*args)
    with taco_jax.compressed({"tensor": "int6h"}) as second:
        other = f(*args)
    assert first.programs == [f"jit_{f.__name__}"] and f"jit_{f.__name__}" in second.programs
    check_equal(one, other)


def test_explicit_meshes_and_a_mesh_that_is_set():
    on = mesh(AxisType.Explicit, data=2, tensor=4)
    ws, x = programs.weights(on)

    def f(w_up, w_down, x):
        h = jnp.tanh(jnp.dot(x, w_up, out_sharding=P("data", "tensor")))
        return jnp.dot(h, w_down, out_sharding=P("data", None))

    f, args = jax.jit(f), (ws[0][0], ws[1][0], x)
    with jax.set_mesh(on):
        exact = f(*args)
        compiled, ours, _ = run(f, args, {"tensor": "int8h"})
    check_close(exact, ours)
    assert u8_share(compiled) == 1


def test_donated_arguments_are_donated_still():
    on = mesh(data=2, tensor=4)
    ws, x = programs.weights(on)

    def update(ws, x):
        _, grads = jax.value_and_grad(functools.partial(programs.loss, on))(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), ws, grads)

    where = jax.tree.map(lambda w: w.sharding, ws)
    f = jax.jit(update, donate_argnums=0, out_shardings=where)
    copies = lambda: jax.tree.map(jnp.copy, ws)
    exact = f(copies(), x)
    with warnings.catch_warnings(record=True) as warned, taco_jax.compressed(PLAN):
        warnings.simplefilter("always")
        compiled = f.lower(ws, x).compile()
        given = copies()
        ours = f(given, x)
    aliased = "input_output_alias={ {0}: (0, {}, may-alias)" in compiled.as_text()
    lines = [str(w.message) for w in warned if "donated arguments" in str(w.message)]
    if jax.__version_info__ >= (0, 11):
        assert aliased and not lines and all(w.is_deleted() for w in jax.tree.leaves(given))
    else:
        assert not aliased and lines
    change = lambda new: jax.tree.map(lambda n, w: (n - w).astype(jnp.float32), new, ws)
    check_close(change(exact), change(ours), 0.1)


def test_sequence_parallel_and_sharded_weights():
    """Activations scattered over tensor, weights over data: gathers of activations go compressed, of weights not."""
    on = mesh(data=2, tensor=4)
    args = programs.weights(on, up=(None, "data", "tensor"), down=(None, "tensor", "data"), tokens=("data", "tensor"))
    where = lambda *spec: NamedSharding(on, P(*spec))

    def layer(x, w_up, w_down):
        x = jax.lax.with_sharding_constraint(x, where("data", None))
        y = jax.nn.gelu(x @ w_up) @ w_down
        return jax.lax.with_sharding_constraint(y, where("data", "tensor"))

    def loss(ws, x):
        x, _ = jax.lax.scan(lambda x, w: (x + layer(x, *w), None), x, ws)
        return (x.astype(jnp.float32) ** 2).mean()

    outs = (where(), jax.tree.map(lambda x: x.sharding, args))
    f = jax.jit(programs.fresh(jax.value_and_grad(loss, argnums=(0, 1))), out_shardings=outs)
    exact = f(*args)
    _, ours, found = run(f, args, PLAN)
    check_close(exact, ours)
    # The plan does not name the gathers of weights, so `require` does not ask for them.
    gathers = {(s.axes, s.compressed, s.named, "all_gather" in s.reason) for s in found if s.operation == "all_gather"}
    assert gathers == {(("tensor",), True, True, False), (("data",), False, False, True)}
    assert not [s for s in found if s.compressed and s.after >= s.before]
    # Named, they go compressed too.
    _, all_of_it, found = run(f, args, PLAN | {"data": {"*": "int8h", "all_gather": "int8h"}})
    assert {s.compressed for s in found if s.operation == "all_gather"} == {True}
    check_close(exact, all_of_it, 0.05)
