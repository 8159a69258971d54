"""Lion, Muon and bfloat16 moments: values by their formulas and by optax, one result on every mesh, checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hlo import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon

from taco_jax.collectives import comm_log
from taco_jax.config import (
    CheckpointConfig,
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from taco_jax.mesh import make_mesh
from taco_jax.models.params import init_params, param_specs
from taco_jax.train import optim
from taco_jax.train.checkpoint import CheckpointError, Checkpoints
from taco_jax.train.data_parallel import DataParallel
from taco_jax.train.dry_run import local_bytes
from taco_jax.train.muon import RMS, SITE, WholeMatrices, orthogonal
from taco_jax.train.step import build

# Two kv heads at tp 4: their kernels are whole on every rank. Three layers: no axis divides them.
CONFIG = TrainConfig(
    model=ModelConfig(vocab_size=64, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=6, d_mlp=40,
                      qkv_bias=True),
    compression=CompressionConfig("none", "none"),
    data=DataConfig(sequence_length=8),
    data_parallel=DataParallelConfig(gradients="none"),
    optimizer=OptimizerConfig(name="muon", learning_rate=1e-2, warmup_steps=1),
    global_batch=8,
    steps=10,
    compute_dtype="float32",
)  # fmt: skip


def tree(key=0):
    keys = iter(jax.random.split(jax.random.key(key), 9))
    draw = lambda *shape: jax.random.normal(next(keys), shape)
    layers = {"up": {"kernel": draw(3, 4, 7), "bias": draw(3, 7)}, "down": {"kernel": draw(3, 7, 4)},
              "norm": {"scale": draw(3, 4)}}  # fmt: skip
    return {"embed": {"table": draw(9, 4)}, "layers": layers, "head": {"kernel": draw(4, 9)}}


def steps_of(optimizer, n=3):
    """(parameters, state) after n steps with random gradients."""
    params, state = tree(), optimizer.init(tree())
    update = jax.jit(optimizer.update)
    for number in range(n):
        updates, state = update(tree(number + 1), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


def assert_trees_close(got, want, **tolerance):
    for (path, a), (_, b) in zip(*(jax.tree_util.tree_flatten_with_path(t)[0] for t in (got, want)), strict=True):
        np.testing.assert_allclose(a, b, err_msg=jax.tree_util.keystr(path), **tolerance)


def test_lion_is_its_formula():
    config = OptimizerConfig(name="lion", learning_rate=0.1, schedule="constant", warmup_steps=0, beta1=0.8,
                             beta2=0.9, weight_decay=0.5, clip_norm=None)  # fmt: skip
    params, m = jax.tree.map(np.asarray, tree()), jax.tree.map(lambda p: np.zeros(p.shape), tree())
    matrix = optim.decayed(tree())
    for number in range(3):
        g = tree(number + 1)
        step = jax.tree.map(lambda w, m, g, d: 0.1 * (np.sign(0.8 * m + 0.2 * g) + 0.5 * d * w), params, m, g, matrix)
        params, m = jax.tree.map(np.subtract, params, step), jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    assert_trees_close(steps_of(optim.make(config, 10)[0])[0], params, rtol=1e-5, atol=1e-6)


def test_muon_is_optax_muon():
    """Each layer's matrices by themselves; embeddings, head, norms and biases by AdamW."""
    options = dict(learning_rate=0.1, warmup_steps=2, momentum=0.9, beta1=0.8, beta2=0.9)
    optimizer, schedule = optim.make(OptimizerConfig(name="muon", **options), 10)
    in_layers = lambda path, p: MuonDimensionNumbers(1, 2) if path[0].key == "layers" and p.ndim == 3 else None
    dims = lambda params: jax.tree_util.tree_map_with_path(in_layers, params)
    theirs = muon(schedule, beta=0.9, weight_decay=0.1, muon_weight_dimension_numbers=dims, consistent_rms=RMS)
    got = steps_of(optimizer)[0]
    matrices = steps_of(optax.chain(optax.clip_by_global_norm(1.0), theirs))[0]
    rest = steps_of(optim.make(OptimizerConfig(**options), 10)[0])[0]
    want = jax.tree.map(lambda label, m, r: m if label == "muon" else r, optim.muon_leaves(got), matrices, rest)
    assert_trees_close(got, want, rtol=1e-5, atol=1e-6)


def test_an_orthogonal_update():
    """Singular values near 1, and the root mean square that the learning rates of AdamW suit."""
    x = jax.random.normal(jax.random.key(0), (2, 32, 48)) * jnp.array([1e-3, 50.0])[:, None, None]
    out = orthogonal(x)
    values = np.linalg.svd(np.asarray(out) / (RMS * 48**0.5), compute_uv=False)
    assert values.shape == (2, 32) and (values > 0.3).all() and (values < 1.3).all()
    assert 0.1 < float(jnp.sqrt(jnp.mean(out**2))) < 0.25
    assert not orthogonal(jnp.zeros((1, 4, 4))).any()


@pytest.mark.parametrize("name", ["adamw", pytest.param("lion", marks=pytest.mark.slow), "muon"])
def test_bfloat16_moments_are_rounded_once_a_step(name):
    """To what float32 arithmetic makes of them: b1 is not rounded, as it is by optax' own mu_dtype."""
    config = OptimizerConfig(name=name, moment_dtype="bfloat16")
    (optimizer, _), (exact, _) = optim.make(config, 10), optim.make(OptimizerConfig(name=name), 10)
    params, state = tree(), optimizer.init(tree())
    flat = lambda state: jax.tree_util.tree_flatten_with_path(state)[0]
    for number in range(2):
        wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, state)
        updates, state = optimizer.update(tree(number), state, params)
        want, wide = exact.update(tree(number), wide, params)
        assert_trees_close(updates, want, rtol=0)
        for (path, a), (_, b) in zip(flat(state), flat(wide), strict=True):
            first = any(getattr(key, "name", "") == "mu" for key in path)
            assert a.dtype == (jnp.bfloat16 if first else b.dtype), path
            np.testing.assert_array_equal(a, b.astype(a.dtype))
    assert any(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(state))


# On meshes


def after_two(program):
    """The state after two steps."""
    state, drawn = program.init(jax.random.key(0)), np.random.default_rng(0)
    for _ in range(2):
        tokens = drawn.integers(0, 64, (program.config.global_batch, 9), np.int32)
        state, _ = program.step(state, {"tokens": jax.device_put(tokens, program.batch_sharding)})
    return state


def named(stored):
    """Weights and the optimiser's state by name, as the model has them."""
    leaves = jax.tree_util.tree_flatten_with_path({"params": stored.params, "opt_state": stored.opt_state})[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float32) for path, leaf in leaves}


def train(config):
    """(`named` of the state after two steps, program)."""
    program = build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))
    return named(program.stored.pack(after_two(program))), program


@pytest.fixture(scope="module")
def alone():
    return train(CONFIG)[0]


MESHES = {
    "tp4": dict(mesh=MeshConfig(tp=4)),
    "shares": dict(mesh=MeshConfig(dp=2, tp=2), data_parallel=DataParallelConfig(gradients="none", zero1=True)),
    "stages": dict(
        mesh=MeshConfig(pp=3, tp=2), pipeline=PipelineConfig(microbatches=2, forward="none", backward="none")
    ),
    "circular": dict(
        mesh=MeshConfig(dp=2, pp=2, tp=2),
        model=dataclasses.replace(CONFIG.model, n_layers=4),
        pipeline=PipelineConfig("circular", microbatches=2, chunks=2, forward="none", backward="none"),
        data_parallel=DataParallelConfig(gradients="none", zero1=True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MESHES))
def test_muon_is_the_same_on_every_mesh(name, alone):
    """Weights and moments, leaf by leaf."""
    config = dataclasses.replace(CONFIG, **MESHES[name])
    got, program = train(config)
    want = alone if config.model == CONFIG.model else train(dataclasses.replace(CONFIG, model=config.model))[0]
    assert got.keys() == want.keys()
    for leaf, value in want.items():
        # The vocabulary is padded for the mesh.
        common = tuple(slice(min(a, b)) for a, b in zip(got[leaf].shape, value.shape, strict=True))
        np.testing.assert_allclose(got[leaf][common], value[common], rtol=2e-4, atol=2e-5, err_msg=leaf)
    check_messages(program.table, program.step)


def test_matrices_of_padded_shares_are_the_same_on_every_mesh():
    """Shares over dp whose padding is along rows, along columns, along the dim that tp cuts too, and along layers."""
    leaves = {
        "rows": ((5, 7, 10), P(None, None, "tp")),
        "columns": ((5, 10, 7), P(None, "tp", None)),
        "both": ((3, 5, 14), P(None, None, "tp")),
        "layers": ((7, 5, 9), P()),
    }
    shapes, specs = ({"layers": {name: leaf[i] for name, leaf in leaves.items()}} for i in (0, 1))
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=lambda s: isinstance(s, tuple))
    config = TrainConfig(data_parallel=DataParallelConfig(gradients="none", zero1=True))
    dp = DataParallel(config, make_mesh(4, 1, 2), specs, shapes)
    padded = {name: (c.dim, c.padding) for name, c in dp.cuts["layers"].items()}
    assert padded == {"rows": (1, 1), "columns": (2, 1), "both": (2, 1), "layers": (0, 1)}
    x = jax.tree.map(lambda s: jax.random.normal(jax.random.key(s.shape[1]), s.shape), shapes)
    got = jax.jit(lambda x: dp.whole(WholeMatrices(dp, 1)(dp.own(x))))(x)
    assert_trees_close(got, jax.tree.map(orthogonal, x), rtol=1e-4, atol=1e-5)


def test_muon_updates_are_the_same_at_tp_4():
    """All leaves of a model, from the same gradients; the whole step is the night's."""
    model, mesh = CONFIG.model, make_mesh(1, 1, 4)
    make = jax.jit(lambda key: init_params(model, key, 4))
    params, grads, mu = (make(jax.random.key(n)) for n in range(3))
    specs = param_specs(model, 4)
    data_parallel = DataParallel(CONFIG, mesh, specs, jax.eval_shape(make, jax.random.key(0)))
    whole, _ = optim.make(CONFIG.optimizer, 10)
    parts, _ = optim.make(CONFIG.optimizer, 10, 1, WholeMatrices(data_parallel, 1))

    def second_update(optimizer):
        state = lambda mu: optim.map_params(
            lambda _, m: 0.1 * jnp.abs(m), optimizer.init(mu), mu, other=lambda n: n + 1
        )
        return jax.jit(lambda params, grads, mu: optimizer.update(grads, state(mu), params))

    spread = lambda values: jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, specs)
    arguments = [spread(values) for values in (params, grads, mu)]
    with comm_log.record() as table:
        compiled = second_update(parts).lower(*arguments).compile()
    got, want = compiled(*arguments), second_update(whole)(params, grads, mu)
    assert_trees_close(got, want, rtol=2e-4, atol=1e-6)
    check_messages(table, compiled)


def check_messages(table, compiled):
    """What muon sends is in the site table, and the compiled program sends no more."""
    rows = [row for row in table.rows() if row.site.startswith(SITE)]
    listed = sorted(h for row in rows for h in row.hlo)
    assert sorted(c for c in collectives(compiled) if c[0] == "all-to-all") == listed
    assert listed and {row.direction for row in rows} == {"forward", "backward"}


# Checkpoints


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: object
    opt_state: object


def state_of(spec=None, **optimizer):
    """(a state after two steps, its shapes, the embedding's and those of its moments spread as `spec` says)."""
    made, mesh = optim.make(OptimizerConfig(**optimizer), 10)[0], make_mesh(1, 1, 3)
    state = State(*steps_of(made, 2))
    place = lambda path, a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(
        mesh, spec if spec and any(getattr(key, "key", "") == "embed" for key in path) else P()))  # fmt: skip
    return state, jax.tree_util.tree_map_with_path(place, state)


def restored(tmp_path, shapes):
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        state, _, remarks = checkpoints.restore(2, shapes, 9, dict)
    return state, remarks


def save(tmp_path, state):
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(2, state, {})


@pytest.mark.parametrize("name", [pytest.param("lion", marks=pytest.mark.slow), "muon"])
def test_states_come_back_on_another_mesh(tmp_path, name):
    state, shapes = state_of(P("tp"), name=name, moment_dtype="bfloat16")
    save(tmp_path, state)
    found, remarks = restored(tmp_path, shapes)
    assert jax.tree.structure(found) == jax.tree.structure(state) and not remarks
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert found.params["embed"]["table"].sharding.spec == P("tp")


@pytest.mark.slow
def test_bfloat16_moments_in_shares_go_on_on_one_device(tmp_path):
    """Of ranks that share the state, with padding; bit for bit, and float32 for a run that asks for it."""
    optimizer = OptimizerConfig(moment_dtype="bfloat16", warmup_steps=1)
    config = dataclasses.replace(CONFIG, **MESHES["shares"] | {"mesh": MeshConfig(dp=4, tp=2)}, optimizer=optimizer)
    want, program = train(config)
    assert any(c.padding for c in jax.tree.leaves(program.data_parallel.cuts))
    state = program.init(jax.random.key(0))
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(2, program.stored.pack(after_two(program)), {}, vocabulary=(64, 256))
        for dtype in ("bfloat16", "float32"):
            changed = dataclasses.replace(optimizer, moment_dtype=dtype)
            alone = build(dataclasses.replace(CONFIG, optimizer=changed), make_mesh(1, 1, 1))
            found, _, _ = checkpoints.restore(2, alone.stored.shapes, 64, lambda: state.scales)
            got = named(alone.stored.pack(alone.stored.unpack(found)))
            assert found.opt_state[1][0].mu["layers"]["mlp"]["up"]["kernel"].dtype == dtype
            for leaf, value in want.items():
                common = tuple(slice(min(a, b)) for a, b in zip(got[leaf].shape, value.shape, strict=True))
                np.testing.assert_array_equal(got[leaf][common], value[common], err_msg=leaf)


def test_bfloat16_moments_take_half_the_memory():
    """One of AdamW's two moments; the dry run's table has these bytes."""
    made = lambda **o: build(dataclasses.replace(CONFIG, optimizer=OptimizerConfig(**o)), make_mesh(1, 1, 1))
    sizes = [local_bytes(made(name=name, moment_dtype=dtype).state_shapes.opt_state)
             for name in ("adamw", "lion") for dtype in ("float32", "bfloat16")]  # fmt: skip
    counts = 8  # of updates: two int32
    whole = sizes[0] - counts
    assert [size - counts for size in sizes] == [whole, whole * 3 // 4, whole // 2, whole // 4]
    texts = {(name, dtype): optim.describe(OptimizerConfig(name=name, moment_dtype=dtype))
             for name in ("adamw", "muon") for dtype in ("float32", "bfloat16")}  # fmt: skip
    assert texts["adamw", "float32"] == "AdamW, two float32 moments"
    assert texts["adamw", "bfloat16"] == "AdamW, moments bfloat16 and float32"
    assert texts["muon", "bfloat16"] == "Muon, AdamW for the rest; first moments bfloat16"


@pytest.mark.parametrize(
    "before, after", [("float32", "bfloat16"), pytest.param("bfloat16", "float32", marks=pytest.mark.slow)]
)
def test_first_moments_change_their_type(tmp_path, before, after):
    state, _ = state_of(moment_dtype=before)
    want, shapes = state_of(moment_dtype=after)
    save(tmp_path, state)
    found, remarks = restored(tmp_path, shapes)
    got, saved = (s.opt_state[1][0].mu for s in (found, state))
    assert remarks == ["the optimiser's first moments are in another type than the checkpoint's"]
    assert jax.tree.map(lambda a: a.dtype, found) == jax.tree.map(lambda a: a.dtype, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(saved), strict=True):
        np.testing.assert_array_equal(a, b.astype(after))


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("adamw", "lion"),
        *(pytest.param(*names, marks=pytest.mark.slow) for names in (("lion", "muon"), ("muon", "adamw"))),
    ],
)
def test_the_state_of_another_optimiser_is_refused(tmp_path, theirs, ours):
    save(tmp_path, state_of(name=theirs)[0])
    message = f"has the optimiser's state of {theirs}, the run has optimizer.name='{ours}'; go on with --optimizer.name"
    with pytest.raises(CheckpointError, match=message):
        restored(tmp_path, state_of(name=ours)[1])
