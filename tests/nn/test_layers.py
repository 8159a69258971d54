"""CompressedDense, NNX and Linen: gradients against the unsharded Flax layers, messages, meshes, bad input."""

import contextlib
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import cover
from flax import nnx
from helpers import make_mesh, run_python
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_models import (
    KEEP_MESSAGES,
    TWINS,
    D,
    F,
    LinenMlp,
    NnxMlp,
    build,
    check_gradients,
    collectives,
    data,
    loss_inside,
    loss_outside,
    place,
)  # fmt: skip

import taco_jax
from taco_jax import CompressedDense
from taco_jax.collectives import comm_log
from taco_jax.nn import linen


@functools.cache
def unsharded_gradients(twin, stack=False, dtype=jnp.float32):
    """Gradients of Flax's own layers, by the parameters and x."""
    variables, _, apply = build(twin, stack)
    return jax.jit(loss_outside(apply))({"params": variables["params"]}, *data(dtype=dtype))[1]


def run_gradients(twin, where, types, tp, sequence_dim, compression, stack=False):
    mesh = make_mesh(dp=8 // tp, tp=tp, explicit=types == "explicit")
    x_BLD, y_BLD = data()
    wanted, wanted_x = unsharded_gradients(twin, stack)
    spec = P("dp") if sequence_dim is None else P("dp", "tp")
    x_BLD, y_BLD = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (x_BLD, y_BLD))
    with jax.set_mesh(mesh) if types == "explicit" else contextlib.nullcontext():
        options = {"mesh": mesh, "compression": compression, "sequence_dim": sequence_dim}
        variables, specs, apply = build(twin, stack, **options)
        if where == "inside":
            run = loss_inside(apply, mesh, specs, sequence_dim)
            variables = place(variables, specs, mesh)
        else:
            run = loss_outside(apply)
            variables = {"params": variables["params"]}
        _, (gradients, gradient_x) = jax.jit(run)(variables, x_BLD, y_BLD)
    check_gradients((gradients["params"], gradient_x), (wanted["params"], wanted_x), compression)


FACTORS = {
    "twin": TWINS, "where": ("outside", "inside"), "types": ("auto", "explicit"), "tp": (2, 4, 8),
    "sequence_dim": (None, 1), "compression": (None, "taco", "int8h"),
}  # fmt: skip
# Any two meet, but for eight ranks and a second codec: a layer hands both on to the collectives.
FEW = cover(2, **FACTORS | {"tp": (2, 4), "compression": (None, "taco")})
PRODUCT = [
    ("nnx", "outside", "auto", 1, None, "taco"),
    *(case for case in itertools.product(*FACTORS.values()) if case not in FEW),
]


@pytest.mark.parametrize(("twin", "where", "types", "tp", "sequence_dim", "compression"), FEW)
def test_gradients(twin, where, types, tp, sequence_dim, compression):
    run_gradients(twin, where, types, tp, sequence_dim, compression)


@pytest.mark.slow
@pytest.mark.parametrize(("twin", "where", "types", "tp", "sequence_dim", "compression"), PRODUCT)
def test_gradients_full_product(twin, where, types, tp, sequence_dim, compression):
    run_gradients(twin, where, types, tp, sequence_dim, compression)


@pytest.mark.parametrize(
    ("twin", "types", "compression"),
    [("nnx", "auto", "taco"), pytest.param("linen", "explicit", None, marks=pytest.mark.slow)],
)
def test_gradients_of_scanned_and_checkpointed_layers(twin, types, compression):
    run_gradients(twin, "outside", types, 4, None, compression, stack=True)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "taco"])
@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("types", ["auto", "explicit"])
@pytest.mark.parametrize("twin", TWINS)
def test_stack_full_product(twin, where, types, sequence_dim, compression):
    run_gradients(twin, where, types, 4, sequence_dim, compression, stack=True)


@pytest.mark.parametrize("twin", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_dtypes_of_bfloat16(twin):
    """Computed in bf16 from float32 parameters, whose gradients are float32."""
    apply, variables, x_BLD, y_BLD = in_bfloat16(twin)
    assert jax.eval_shape(apply, variables, x_BLD).dtype == jnp.bfloat16
    _, gradients = jax.eval_shape(loss_outside(apply), variables, x_BLD, y_BLD)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradients[0]))


@pytest.mark.parametrize("twin", [pytest.param("nnx", marks=pytest.mark.slow), "linen"])
def test_bfloat16(twin):
    apply, variables, x_BLD, y_BLD = in_bfloat16(twin)
    _, gradients = jax.jit(loss_outside(apply))(variables, x_BLD, y_BLD)
    check_gradients(gradients, unsharded_gradients(twin, dtype=jnp.bfloat16), "taco")


def in_bfloat16(twin):
    variables, _, apply = build(twin, mesh=make_mesh(dp=2, tp=4), compression="taco", dtype=jnp.bfloat16)
    return apply, {"params": variables["params"]}, *data(dtype=jnp.bfloat16)


# What is sent


@pytest.mark.parametrize(
    ("twin", "types", "sequence_dim", "remat"),
    [
        ("nnx", "auto", None, False),
        ("linen", "explicit", 1, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(TWINS, ("auto", "explicit"), (None, 1), (False, True))
        ),
    ],
)
def test_messages(twin, types, sequence_dim, remat):
    """Activations travel as uint8 within their tp group, as often as the table says; the rest is sums of parameters."""
    mesh = make_mesh(dp=2, tp=4, explicit=types == "explicit")
    # An activation is larger than all parameters together, on every device.
    spec = P("dp") if sequence_dim is None else P("dp", "tp")
    x_BLD, y_BLD = (jax.device_put(a, NamedSharding(mesh, spec)) for a in data(batch=16, length=64))
    with jax.set_mesh(mesh):
        variables, specs, apply = build(twin, compression="taco", sequence_dim=sequence_dim)
        variables = place(variables, specs, mesh)
        scales = variables.pop("scales")
        run = lambda v, x: apply({**v, "scales": scales}, x)
        if remat:
            run = jax.checkpoint(run, policy=KEEP_MESSAGES)
        loss = lambda v, x, y: jnp.mean((run(v, x) - y) ** 2)
        with comm_log.record() as table:
            lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(variables, x_BLD, y_BLD)
        found = collectives(lowered.compile())
    parameters = sum(v.size for v in jax.tree.leaves(variables["params"]))
    compressed = [row for row in table.rows() if row.codec == "taco"]
    sent = sorted((op, n) for op, dtype, n, _ in found if dtype == "u8")
    assert sent == sorted((op, n) for row in compressed for op, _, n in row.hlo)
    assert len(sent) == 4
    up, down = ("up", "down") if twin == "linen" else ("column", "row")
    wanted = {(up, "backward"), (down, "forward")}
    if sequence_dim is not None:
        wanted |= {(up, "forward"), (down, "backward")}
    assert {(row.site, row.direction) for row in compressed} == wanted
    for opcode, dtype, elements, groups in found:
        if dtype == "u8":
            assert groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
        else:
            assert opcode == "all-reduce"
            assert elements <= parameters < 8 * 64 * D


# Meshes and metadata


def test_partition_metadata_without_a_mesh():
    specs = {"up/kernel": P(None, "tp"), "up/bias": P("tp"), "down/kernel": P("tp", None), "down/bias": P(None)}
    model = NnxMlp(nnx.Rngs(0), compression="taco")
    found = nnx.get_partition_spec(nnx.state(model))
    assert {f"{n}/{k}": found[n][k].get_value() for n in ("up", "down") for k in ("kernel", "bias")} == specs
    variables = jax.eval_shape(LinenMlp({"compression": "taco"}).init, jax.random.key(0), jnp.zeros((1, D)))
    found = nn.get_partition_spec(variables)["params"]
    assert {f"{n}/{k}": found[n][k] for n in ("up", "down") for k in ("kernel", "bias")} == specs


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_parameters_are_created_sharded_where_the_mesh_is_known(types):
    mesh = make_mesh(dp=2, tp=4, explicit=types == "explicit")
    for context, options in ((contextlib.nullcontext(), {"mesh": mesh}), (jax.set_mesh(mesh), {})):
        with context:
            layer = CompressedDense(D, F, rngs=nnx.Rngs(0), **options)
            assert layer.kernel[...].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "tp")), 2)
            np.testing.assert_array_equal(layer.kernel[...], nnx.Linear(D, F, rngs=nnx.Rngs(0)).kernel[...])


def test_partition_metadata_with_a_mesh():
    mesh = make_mesh(dp=2, tp=4)
    split = lambda array, *names: array.sharding.is_equivalent_to(NamedSharding(mesh, P(*names)), array.ndim)
    layer = linen.CompressedDense(F, mesh=mesh)
    assert split(nn.unbox(layer.init(jax.random.key(0), jnp.zeros((1, D))))["params"]["kernel"], None, "tp")
    # Metadata of the user's own initializer wins: parameters that are cut over dp as well.
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("dp", "tp"))
    finer, layer = (CompressedDense(D, F, mesh=mesh, rngs=nnx.Rngs(0), **o) for o in ({"kernel_init": kernel_init}, {}))
    assert split(finer.kernel[...], "dp", "tp")
    x_BLD, _ = data()
    np.testing.assert_allclose(finer(x_BLD), layer(x_BLD), rtol=1e-6, atol=1e-6)
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("dp", "tp"))
    layer = linen.CompressedDense(F, mesh=mesh, kernel_init=kernel_init)
    variables = layer.init(jax.random.key(0), x_BLD)
    assert nn.get_partition_spec(variables)["params"]["kernel"] == P("dp", "tp")
    assert layer.apply(variables, x_BLD).shape == (8, 8, F)


def test_batch_axes():
    mesh = make_mesh(dp=2, pp=2, tp=2)
    x_BLD, _ = data(batch=6)
    layer = lambda batch_axes=None: CompressedDense(D, F, mesh=mesh, batch_axes=batch_axes, rngs=nnx.Rngs(0))
    y_BLF = layer("dp")(x_BLD)
    assert y_BLF.sharding.spec == P("dp", None, "tp")
    assert layer(("dp",))(x_BLD[:4]).sharding.spec == P("dp", None, "tp")
    assert layer()(x_BLD[:4]).sharding.spec == P(("dp", "pp"), None, "tp")
    np.testing.assert_allclose(layer(())(x_BLD), y_BLF, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(layer()(x_BLD[0, 0]), y_BLF[0, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"batch_axes=\('dp', 'pp'\): dim 0 of x has size 6 .* multiple of 4, the dev"):
        layer()(x_BLD)
    with pytest.raises(ValueError, match=r"batch_axes='dpx' is unknown: did you mean 'dp'"):
        layer("dpx")
    with pytest.raises(ValueError, match="its only dim holds the features"):
        layer("dp")(x_BLD[0, 0])


# Bad input

BAD_ARGUMENTS = [
    ({"kind": "colum"}, "kind='colum' is unknown: did you mean 'column'"),
    ({"compression": "tako"}, "compression='tako' is unknown: did you mean 'taco'"),
    (
        {"compression": taco_jax.Compression("int4h", error_feedback=True)},
        "error_feedback=True: a layer by itself hands no error",
    ),
    (
        {"compression": taco_jax.Compression("int4h", backward_error_feedback=True)},
        "compression.backward_error_feedback=True: a layer by itself hands no error",
    ),
    ({"axis": "tpx"}, "axis='tpx' is unknown: did you mean 'tp'"),
    ({"out_features": 30}, "out_features=30: .* 4 devices of axis 'tp', .* try 28 or 32, or an axis of 1, 2, .*30 dev"),
    ({"kind": "row", "out_features": 30, "features": 66}, r"in_features=66: .* try 64 or 68"),
    ({"sequence_dim": 2}, r"sequence_dim=2: x has shape \(8, 8, 64\); valid are 0 to 1"),
    ({"sequence_dim": 1, "length": 6}, "sequence_dim=1: its size 6 .* multiple of 4"),
    ({"sequence_dim": "1"}, "sequence_dim='1': is of type str; must be an integer, a dim of x, or None"),
    ({"out_features": 0}, "out_features=0: must be an integer of at least 1"),
    ({"out_features": -4}, "out_features=-4: must be an integer of at least 1"),
    ({"out_features": 32.0}, "out_features=32.0: is of type float; must be an integer"),
    ({"batch_axes": 3}, "batch_axes=3: must be the name of a mesh axis, several of them, or None"),
    ({"batch_axes": ("dp", 3)}, r"batch_axes=\('dp', 3\): must be the name of a mesh axis"),
]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda v: v if isinstance(v, str) else None)
def test_bad_arguments(twin, arguments, message):
    mesh = make_mesh(dp=2, tp=4)
    arguments = dict(arguments)
    out_features, length = arguments.pop("out_features", F), arguments.pop("length", 8)
    features = arguments.pop("features", D)
    width = features if features == 66 else D
    x_BLD = jnp.zeros((8, length, width))
    with pytest.raises((TypeError, ValueError), match=message):
        if twin == "nnx":
            CompressedDense(features, out_features, mesh=mesh, rngs=nnx.Rngs(0), **arguments)(x_BLD)
        else:
            layer = linen.CompressedDense(out_features, mesh=mesh, **arguments)
            layer.apply(layer.init(jax.random.key(0), x_BLD), x_BLD)


def test_features_of_x():
    layer = CompressedDense(D, F, mesh=make_mesh(dp=2, tp=4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x has shape \(8, 8, 60\); its last dim must be in_features=64"):
        layer(jnp.zeros((8, 8, 60)))


@pytest.mark.parametrize("twin", TWINS)
def test_no_mesh(twin):
    variables, _, apply = build(twin, compression="taco")
    with pytest.raises(ValueError, match=r"has no mesh: pass mesh=.*jax.set_mesh\(mesh\).*jax.shard_map"):
        apply(variables, jnp.zeros((8, 8, D)))
    variables, _, apply = build(twin, mesh=make_mesh(dp=2, tp=4))
    with jax.set_mesh(make_mesh(dp=1, tp=8)), pytest.raises(ValueError, match="mesh has the axes .* leave mesh out"):
        apply(variables, jnp.zeros((8, 8, D)))


@pytest.mark.parametrize("twin", TWINS)
def test_regions_where_gradients_would_be_wrong(twin):
    mesh = make_mesh(dp=2, tp=4)
    x_BLD, _ = data()
    variables, specs, apply = build(twin, compression="taco")
    variables, specs = {"params": variables["params"]}, {"params": specs["params"]}
    run = lambda specs, **options: jax.shard_map(
        apply, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P("dp"), **options
    )
    with pytest.raises(ValueError, match="check_vma=False"):
        run(specs, check_vma=False)(variables, x_BLD)
    with pytest.raises(ValueError, match="axis 'tp' is not a manual mesh axis here"):
        partly = jax.shard_map(apply, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), axis_names={"dp"})
        jax.jit(partly)(variables, x_BLD)


@pytest.mark.parametrize("twin", TWINS)
def test_a_region_that_is_manual_over_tp_only(twin):
    mesh = make_mesh(dp=2, tp=4)
    x_BLD, y_BLD = (jax.device_put(a, NamedSharding(mesh, P("dp"))) for a in data())
    variables, specs, apply = build(twin, compression="taco")

    def gradients(v, x, y):
        rest = {k: leaf for k, leaf in v.items() if k != "scales"}
        fixed = {k: leaf for k, leaf in v.items() if k == "scales"}
        loss = lambda rest, x: jnp.sum((apply(rest | fixed, x) - y) ** 2) / y_BLD.size
        return jax.grad(loss, argnums=(0, 1))(rest, x)

    out = {k: spec for k, spec in specs.items() if k != "scales"}, P()
    run = jax.jit(
        jax.shard_map(gradients, mesh=mesh, in_specs=(specs, P(), P()), out_specs=out, axis_names={"tp"})
    )  # fmt: skip
    gradients, gradient_x = run(variables, x_BLD, y_BLD)
    wanted, wanted_x = unsharded_gradients(twin)
    check_gradients((gradients["params"], gradient_x), (wanted["params"], wanted_x), "taco")
    assert all((np.asarray(slot) != 0).any() for slot in jax.tree.leaves(gradients["slots"]))
    sent = {
        dtype for opcode, dtype, n, _ in collectives(run.lower(variables, x_BLD, y_BLD).compile()) if "all-to" in opcode
    }
    assert sent == {"u8"}


def test_global_parameters_or_split_inputs_inside_a_region():
    mesh = make_mesh(dp=2, tp=4)
    x_BLD, _ = data()
    for kind, x_spec, kernel_spec, message in (
        ("row", P("dp"), P(), r"kind='row'\) inside jax.shard_map: .* its shard of the features in x"),
        ("column", P("dp"), P(), "all features in x"),
        ("column", P("dp", "tp"), P(None, "tp"), "x differs between the devices of axis 'tp'"),
    ):
        layer = CompressedDense(D, D, kind=kind, use_bias=False, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        run = jax.shard_map(
            lambda s, x, graph=graph: nnx.merge(graph, s)(x),
            mesh=mesh, in_specs=(kernel_spec, x_spec), out_specs=P("dp"),
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run(state, x_BLD)
    layer = linen.CompressedDense(D)
    initialize = jax.shard_map(lambda x: layer.init(jax.random.key(0), x), mesh=mesh, in_specs=P("dp"), out_specs=P())
    with pytest.raises(ValueError, match="initialise it outside jax.shard_map"):
        initialize(x_BLD)


def test_explicit_types_that_would_have_to_be_gathered():
    mesh = make_mesh(dp=2, tp=4, explicit=True)
    layer = CompressedDense(D, F, mesh=mesh, rngs=nnx.Rngs(0))
    x_BLD, _ = data()
    for spec, message in (
        (P("dp", "tp"), "dim 1 of x is split over axis 'tp' .* or sequence_dim=1"),
        (P(None, None, "tp"), "dim 2 of x is split over axis 'tp'"),
        (P(None, None, "dp"), "features of x are split over .'dp'."),
    ):
        with pytest.raises(ValueError, match=message):
            layer(jax.device_put(x_BLD, NamedSharding(mesh, spec)))


def test_layers_are_imported_when_asked_for():
    run_python(
        "import sys, taco_jax; assert 'flax' not in sys.modules\n"
        "from taco_jax import AmaxSlot, CompressedDense, SiteScaleState"
    )
    assert "CompressedDense" in dir(taco_jax)
    assert taco_jax.SiteScale is taco_jax.SiteScaleState
    with pytest.raises(AttributeError, match="no attribute 'CompresedDense'"):
        _ = taco_jax.CompresedDense
