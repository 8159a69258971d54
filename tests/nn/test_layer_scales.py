"""Site scales of CompressedDense, NNX and Linen, in training loops that use them and in such that do not."""

import re
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from layer_models import (
    LAYERS,
    D,
    LinenMlp,
    NnxMlp,
    build,
    by_name,
    check_gradients,
    data,
    loss_inside,
    loss_outside,
)  # fmt: skip
from reference_codec import REFERENCES

import taco_jax
from taco_jax import AmaxSlot, CompressedDense, SiteScaleState
from taco_jax.compression.site_scales import new_scale_state

SLOTS = nnx.DiffState(0, nnx.Any(nnx.Param, AmaxSlot))


def slot_gradients(apply, x_BLD, y_BLD):
    """jit of the gradients by all variables but the scales."""

    @jax.jit
    def run(rest, scales):
        return jax.grad(lambda v: jnp.mean((apply({**v, "scales": scales}, x_BLD) - y_BLD) ** 2))(rest)

    return lambda variables: run({k: v for k, v in variables.items() if k != "scales"}, variables["scales"])


@pytest.mark.parametrize("twin", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_site_scales(twin):
    """The slot's gradient is the largest block scale on any device; update_scales makes exponents of it."""
    mesh = make_mesh(dp=2, tp=4)
    x_BLD, y_BLD = data()
    variables, _, apply = build(twin, mesh=mesh, compression="taco")
    gradients_of = slot_gradients(apply, x_BLD, y_BLD)
    gradients = gradients_of(variables)
    slots = by_name(gradients["slots"])
    assert {k: v.shape for k, v in slots.items()} == {"up/amax_slot": (2, 1), "down/amax_slot": (2, 1)}
    # f has no forward message, g no backward one.
    assert slots["up/amax_slot"][0] == slots["down/amax_slot"][1] == 0

    params = by_name(variables["params"])
    h_BLF = np.asarray(nnx.gelu(np.asarray(x_BLD) @ params["up/kernel"] + params["up/bias"]))
    parts = []
    for half in (h_BLF[:4], h_BLF[4:]):
        terms = [h @ k for h, k in zip(np.split(half, 4, -1), np.split(params["down/kernel"], 4, 0), strict=True)]
        parts += [*terms, sum(terms)]
    expected = max(np.abs(REFERENCES["taco"].to_blocks(part)).max() for part in parts) / 448
    assert slots["down/amax_slot"][0] == pytest.approx(expected, rel=0.05)

    scales = taco_jax.update_scales(variables["scales"], gradients["slots"])
    assert jax.tree.structure(scales) == jax.tree.structure(variables["scales"])
    state = by_name(scales)
    exponent = lambda slot: int(np.ceil(np.log2(slot)))
    assert state["up/exponents"].tolist() == [taco_jax.UNCALIBRATED, exponent(slots["up/amax_slot"][1, 0])]
    assert state["down/exponents"].tolist() == [exponent(slots["down/amax_slot"][0, 0]), taco_jax.UNCALIBRATED]
    assert state["up/history"][1, 0] == slots["up/amax_slot"][1, 0] and not state["up/history"][1, 1:].any()

    reference = build(twin)[2]
    _, wanted = jax.jit(loss_outside(reference))({"params": variables["params"]}, x_BLD, y_BLD)
    calibrated = gradients_of({**variables, "scales": scales})
    check_gradients(calibrated["params"], wanted[0]["params"], "taco")
    assert any(
        (a != b).any() for a, b in zip(*(jax.tree.leaves(g["params"]) for g in (gradients, calibrated)), strict=True)
    )
    # Who ignores the state gets what an uncalibrated state gives.
    _, ignored = jax.jit(loss_outside(apply))({"params": variables["params"]}, x_BLD, y_BLD)
    jax.tree.map(np.testing.assert_array_equal, ignored[0]["params"], gradients["params"])


@pytest.mark.slow
@pytest.mark.parametrize("twin", ["linen", "nnx"])
def test_site_scales_inside_a_region_and_stacked(twin):
    mesh = make_mesh(dp=2, tp=4)
    x_BLD, y_BLD = data()
    variables, specs, apply = build(twin, stack=True, mesh=mesh, compression="taco")
    outside = slot_gradients(apply, x_BLD, y_BLD)(variables)["slots"]
    _, (inside, _) = jax.jit(loss_inside(apply, mesh, specs, None))(variables, x_BLD, y_BLD)
    for slot, same in zip(jax.tree.leaves(outside), jax.tree.leaves(inside["slots"]), strict=True):
        assert slot.shape == (LAYERS, 2, 1) and (slot.sum((1, 2)) > 0).all()
        np.testing.assert_allclose(slot, same, rtol=1e-3)
    exponents = [
        v for k, v in by_name(taco_jax.update_scales(variables["scales"], outside)).items() if k.endswith("exponents")
    ]
    assert all(e.shape == (LAYERS, 2) and (e != taco_jax.UNCALIBRATED).sum() == LAYERS for e in exponents)


def test_update_scales_of_plain_trees():
    state = {
        "a": new_scale_state((3,), 4),
        "b": {"c": new_scale_state((), 4)},
    }
    slots = {
        "a": np.zeros((8, 3, 2, 1), np.float32),
        "b": {"c": np.full((2, 6), np.nan, np.float32)},
        "other": np.ones(2),
    }
    slots["a"][5, 2, 1] = 3.0
    new = taco_jax.update_scales(state, slots)
    wanted = np.full((3, 2), taco_jax.UNCALIBRATED)
    wanted[2, 1] = 2
    np.testing.assert_array_equal(new["a"].exponents, wanted)
    np.testing.assert_array_equal(new["b"]["c"].exponents, state["b"]["c"].exponents)  # not finite: as it was
    with pytest.raises(ValueError, match="amax slot of 'b/c'"):
        taco_jax.update_scales(state, {"a": slots["a"]})


def test_layer_that_is_used_twice():
    """The gradients of its slot add: its exponent is at most one too high. Layers that share parameters keep theirs."""
    mesh = make_mesh(dp=2, tp=4)
    x_BLD, _ = data()
    make = lambda: CompressedDense(D, D, kind="row", compression="taco", mesh=mesh, rngs=nnx.Rngs(0))

    class Twice(nnx.Module):
        def __init__(self, share):
            self.a = self.b = make()
            if share:
                self.b = make()
                self.b.kernel, self.b.bias = self.a.kernel, self.a.bias

        def __call__(self, x):
            return self.a(x), self.b(x)

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda m: sum(jnp.sum(y**2) for y in m(x_BLD)), argnums=SLOTS)(model)

    added, shared = by_name(gradients(Twice(False))), by_name(gradients(Twice(True)))
    assert set(added) == {"a/kernel", "a/bias", "a/amax_slot"} and set(shared) == set(added) | {"b/amax_slot"}
    np.testing.assert_array_equal(added["a/amax_slot"], 2 * shared["a/amax_slot"])
    np.testing.assert_array_equal(shared["b/amax_slot"], shared["a/amax_slot"])
    np.testing.assert_allclose(added["a/kernel"], shared["a/kernel"], rtol=1e-5)


def test_nnx_training_step_with_site_scales():
    mesh = make_mesh(dp=2, tp=4)
    x_BLD, y_BLD = data()
    model = NnxMlp(nnx.Rngs(0), mesh=mesh, compression="taco")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = by_name(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer):
        loss = lambda m: jnp.mean((m(x_BLD) - y_BLD) ** 2)
        value, gradients = nnx.value_and_grad(loss, argnums=SLOTS)(model)
        optimizer.update(model, nnx.filter_state(gradients, nnx.Param))
        nnx.update(model, taco_jax.update_scales(nnx.state(model, SiteScaleState), gradients))
        return value

    losses = [float(step(model, optimizer)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    after = by_name(nnx.state(model, nnx.Param))
    assert all((after[k] != before[k]).any() for k in before)
    state = by_name(nnx.state(model, SiteScaleState))
    assert (state["down/history"][0, :3] > 0).all() and not state["down/history"][0, 3:].any()
    assert not any(v.any() for v in by_name(nnx.state(model, AmaxSlot)).values())
    assert model.up.kernel[...].sharding.spec == P(None, "tp")


@pytest.mark.slow  # the recipes of docs/layers.md are one too
def test_a_layer_comes_back_from_orbax(tmp_path, make_mesh):
    """All of its variables on the mesh that it was given, so that one program takes them."""
    import orbax.checkpoint as ocp

    layer = CompressedDense(D, D, compression="taco", mesh=make_mesh(dp=2, tp=4), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "c", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    run, x = jax.jit(lambda state, x: nnx.merge(graph, state)(x)), jnp.ones((4, 8, D))
    np.testing.assert_array_equal(run(restored, x), run(state, x))


@pytest.mark.slow
def test_orbax_as_the_docstring_says(tmp_path):
    """Word for word, onto another mesh: sharded as made there, with the values of the model that was saved."""
    import orbax.checkpoint

    options = {"kind": "row", "compression": "taco"}
    saved = CompressedDense(D, D, mesh=make_mesh(dp=2, tp=4), rngs=nnx.Rngs(0), **options)
    model = CompressedDense(D, D, mesh=(mesh := make_mesh(dp=4, tp=2)), rngs=nnx.Rngs(1), **options)
    saved.exponents[...] = jnp.array([3, -5])
    recipe = re.search(r"        with orbax.*?\n\n", CompressedDense.__doc__, re.DOTALL)[0]
    save, restore = re.split(r"(?<=ends)\n", textwrap.dedent(recipe))
    run = lambda code, model: exec(code, {"nnx": nnx, "orbax": orbax, "folder": tmp_path / "c", "model": model})
    run(save, saved), run(restore, model)
    want, have = (by_name(nnx.state(m, nnx.Any(nnx.Param, SiteScaleState))) for m in (saved, model))
    assert {"kernel", "bias", "exponents", "history"} == have.keys() == want.keys()
    assert all((have[k] == want[k]).all() for k in want)
    assert model.kernel[...].sharding == jax.sharding.NamedSharding(mesh, P("tp", None))
    assert jax.jit(lambda m, x: m(x))(model, jnp.ones((4, 8, D))).shape == (4, 8, D)


@pytest.mark.parametrize("jitted", [False, True])
def test_linen_variables_lie_where_orbax_may_bring_them_back(jitted):
    """Committed where they are, as a restore leaves them: on the layer's mesh, so that one program takes them."""
    model = LinenMlp({"mesh": make_mesh(dp=2, tp=4), "compression": "taco"})
    x_BLD, _ = data()
    init = lambda key: model.init(key, x_BLD[:1])
    variables = nn.unbox((jax.jit(init) if jitted else init)(jax.random.key(0)))
    committed = jax.tree.map(lambda a: jax.device_put(a, a.sharding), variables)
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(committed, x_BLD), run(variables, x_BLD))


@pytest.mark.slow
def test_nnx_training_step_that_ignores_site_scales():
    """Default nnx.grad and nnx.Optimizer, on a model that was built without a mesh."""
    x_BLD, y_BLD = data()
    model = NnxMlp(nnx.Rngs(0), compression="taco")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x_BLD) - y_BLD) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    with jax.set_mesh(make_mesh(dp=2, tp=4)):
        losses = [float(step(model, optimizer)) for _ in range(2)]
    assert losses[0] > losses[1]
    assert (model.down.exponents[...] == taco_jax.UNCALIBRATED).all()


@pytest.mark.slow
def test_linen_train_state_with_site_scales():
    """Flax's own TrainState overwrites the slots with their gradients and keeps them from the optimizer."""
    x_BLD, y_BLD = data()
    model = LinenMlp({"mesh": make_mesh(dp=2, tp=4), "compression": "taco"})
    variables = nn.unbox(model.init(jax.random.key(0), x_BLD[:1]))
    scales = variables.pop("site_scale")
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))

    @jax.jit
    def step(state, scales):
        loss = lambda v: jnp.mean((state.apply_fn({**v, "site_scale": scales}, x_BLD) - y_BLD) ** 2)
        value, gradients = jax.value_and_grad(loss)(state.params)
        scales = taco_jax.update_scales(scales, gradients[OVERWRITE_WITH_GRADIENT])
        return state.apply_gradients(grads=gradients), scales, value

    losses = []
    for _ in range(3):
        state, scales, value = step(state, scales)
        losses.append(float(value))
    assert losses[0] > losses[1] > losses[2]
    assert (scales["down"]["history"][0, :3] > 0).all()
