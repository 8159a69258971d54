"""`taco_jax.dot` and `dot_general`: against the unsharded product, in Flax's own layers, what is sent, bad input."""

import functools

import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import in_turn
from flax import nnx
from helpers import make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax.collectives import comm_log

DP, TP = 2, 4
BATCH, LENGTH, D, HEADS, HEAD_DIM = 4, 8, 256, 8, 32
HEAD = "row", (((2, 3), (0, 1)), ((), ()))
# kind, dimension numbers, shape of x, shape of the kernel, dim of the kernel that is split.
CASES = {
    "row": ("row", (((2,), (0,)), ((), ())), (BATCH, LENGTH, D), (D, 64), 0),
    "column": ("column", (((2,), (0,)), ((), ())), (BATCH, LENGTH, D), (D, 64), 1),
    "to_heads": ("column", (((2,), (0,)), ((), ())), (BATCH, LENGTH, D), (D, HEADS, HEAD_DIM), 1),
    "of_heads": (*HEAD, (BATCH, LENGTH, HEADS, HEAD_DIM), (HEADS, HEAD_DIM, D), 0),
    "second_dim": (*HEAD, (BATCH, LENGTH, HEADS, HEAD_DIM), (HEADS, HEAD_DIM, D), 1),
    "transposed": ("row", (((1,), (1,)), ((), ())), (BATCH, D, LENGTH), (64, D), 1),
    "experts": ("row", (((2,), (1,)), ((0,), (0,))), (3, BATCH, D), (3, D, 64), 1),
    "experts_column": ("column", (((2,), (1,)), ((0,), (0,))), (3, BATCH, D), (3, D, 64), 2),
}


def split(case):
    """The specs of x and of the kernel on a mesh of Explicit axes."""
    kind, ((summed, kernel_summed), (shared, _)), x_shape, kernel_shape, dim = case
    x, kernel = [None] * len(x_shape), [None] * len(kernel_shape)
    kernel[dim] = "tp"
    x[next(d for d in range(len(x)) if d not in summed + shared)] = "dp"
    if kind == "row":
        x[summed[kernel_summed.index(dim)]] = "tp"
    return P(*x), P(*kernel)


def relative(got, want):
    got, want = np.float64(got), np.float64(want)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def check(got, want, bound=0.03):
    """Leaf by leaf: the error of 8-bit codecs, and the slope."""
    flat = lambda tree: jax.tree_util.tree_leaves_with_path(tree)
    assert [path for path, _ in flat(got)] == [path for path, _ in flat(want)]
    for (path, g), (_, w) in zip(flat(got), flat(want), strict=True):
        g, w = np.float64(g), np.float64(w)
        assert relative(g, w) < bound, path
        assert abs(np.vdot(g, w) / np.vdot(w, w) - 1) < 0.02, path


def check_sent(compiled):
    """What ranks of one tp group send each other is u8, but for scalars."""
    same = lambda group: len({device // TP for device in group}) < len(group)
    sent = [(dtype, n) for _, dtype, n, groups in hlo.groups(compiled) if any(map(same, groups)) and n > 1]
    assert sent and {dtype for dtype, _ in sent} == {"uint8"}, sent


def data(case):
    x_shape, kernel_shape = case[2:4]
    generator = np.random.default_rng(0)
    return (generator.normal(size=shape).astype(np.float32) for shape in (x_shape, kernel_shape))


def loss(product, x, kernel):
    y = product(x, kernel)
    return jnp.sum(jnp.cos(jnp.arange(y.size) * 0.37).reshape(y.shape) * y), y


def gradients(product):
    return jax.value_and_grad(functools.partial(loss, product), argnums=(0, 1), has_aux=True)


@functools.cache
def unsharded(name):
    case = CASES[name]
    (_, y), both = jax.jit(gradients(lambda x, kernel: lax.dot_general(x, kernel, case[1])))(*data(case))
    return y, both


@pytest.mark.parametrize("name,explicit", in_turn(CASES))
def test_values_and_gradients(name, explicit):
    kind, numbers, _, _, dim = case = CASES[name]
    mesh = make_mesh(dp=DP, tp=TP, explicit=explicit)
    # On Explicit axes the types say what is split.
    options = {} if explicit else {"kind": kind, "kernel_dim": dim}
    product = taco_jax.dot_general("tp", compression="int8h", **options)
    x, kernel = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(data(case), split(case), strict=True))
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients(lambda x, kernel: product(x, kernel, numbers))).lower(x, kernel).compile()
        (_, y), both = compiled(x, kernel)
    want, wanted = unsharded(name)
    check((y, both), (want, wanted))
    # The message is where the kind says, and there it is compressed.
    exact, compressed = (both[0], y) if kind == "row" else (y, both[0])
    exact_want, compressed_want = (wanted[0], want) if kind == "row" else (want, wanted[0])
    assert relative(exact, exact_want) < 1e-5 and relative(compressed, compressed_want) > 1e-4
    assert relative(both[1], wanted[1]) < 1e-5
    check_sent(compiled)


@pytest.mark.parametrize("name", ["of_heads", pytest.param("column", marks=pytest.mark.slow)])
def test_in_scan_and_remat_inside_and_outside_a_region(name):
    kind, numbers, _, _, _ = case = CASES[name]
    mesh = make_mesh(dp=DP, tp=TP)
    x, kernel = (np.asarray(a) for a in data(case))
    kernels = np.stack([kernel, 0.5 * kernel, kernel - 1]) / 16

    def total(product, x, kernels):
        body = jax.checkpoint(lambda total, kernel: (total + jnp.sum(jnp.sin(product(x, kernel))), None))
        return lax.scan(body, jnp.zeros(()), kernels)[0]

    exact = lambda x, kernel: lax.dot_general(x, kernel, numbers)
    want = jax.jit(jax.grad(functools.partial(total, exact), argnums=(0, 1)))(x, kernels)
    product = functools.partial(
        taco_jax.dot_general("tp", compression="int8h", kind=kind), dimension_numbers=numbers
    )  # fmt: skip
    with jax.set_mesh(mesh):
        check(jax.jit(jax.grad(functools.partial(total, product), argnums=(0, 1)))(x, kernels), want, 0.06)
    x_spec, kernel_spec = split(case)
    kernel_spec = P(None, *kernel_spec)
    product = functools.partial(taco_jax.dot_general("tp", compression="int8h"), dimension_numbers=numbers)

    def inside(axes, x, kernels):
        def local(x, kernels):
            # Every device's gradient of its own part; a row layer's sum is the same on all ranks.
            varying = {"dp", "tp"} & axes if kind == "column" else {"dp"} & axes

            def own(x, kernels):
                body = jax.checkpoint(lambda total, kernel: (total + jnp.sum(jnp.sin(product(x, kernel))), None))
                start = jnp.zeros(())
                start = lax.pcast(start, tuple(sorted(varying)), to="varying") if varying else start
                value = lax.scan(body, start, kernels)[0]
                return lax.psum(value, tuple(sorted(varying))) if varying else value

            return jax.grad(own, argnums=(0, 1))(x, kernels)

        only = lambda spec: P(*(a if a in axes else None for a in spec))
        specs = only(x_spec), only(kernel_spec)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=axes)(x, kernels)

    for axes in ({"dp", "pp", "tp"}, {"tp"}):
        run = jax.jit(functools.partial(inside, axes))
        check(run(x, kernels), want, 0.06)
        compiled = run.lower(*place(mesh, (x, kernels), (x_spec, kernel_spec))).compile()
        check_sent(compiled)


def place(mesh, arrays, specs):
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


class NnxBlock(nnx.Module):
    """Heads and an MLP, every sum of which goes over tp."""

    def __init__(self, dot, rngs):
        self.to_heads = nnx.LinearGeneral(D, (HEADS, HEAD_DIM), **dot("column"), rngs=rngs)
        self.of_heads = nnx.LinearGeneral((HEADS, HEAD_DIM), D, axis=(-2, -1), **dot("row"), rngs=rngs)
        self.up = nnx.Linear(D, 2 * D, **dot("column"), rngs=rngs)
        self.down = nnx.Linear(2 * D, D, **dot("row"), rngs=rngs)

    def __call__(self, x):
        x = x + self.of_heads(jnp.tanh(self.to_heads(x)))
        return x + self.down(jnp.tanh(self.up(x)))


class LinenBlock(nn.Module):
    dot: object

    @nn.compact
    def __call__(self, x):
        heads = nn.DenseGeneral((HEADS, HEAD_DIM), name="to_heads", **self.dot("column"))(x)
        x = x + nn.DenseGeneral(D, axis=(-2, -1), name="of_heads", **self.dot("row"))(jnp.tanh(heads))
        up = nn.Dense(2 * D, name="up", **self.dot("column"))(x)
        return x + nn.Dense(D, name="down", **self.dot("row"))(jnp.tanh(up))


def no_dot(kind):
    return {}


def compressed_dot(kind):
    return {"dot_general": taco_jax.dot_general("tp", compression="int8h", kind=kind)}


@pytest.mark.parametrize("twin", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_layers_of_flax(twin):
    mesh = make_mesh(dp=DP, tp=TP)
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, D)).astype(np.float32)

    def build(dot):
        if twin == "nnx":
            graph, params = nnx.split(NnxBlock(dot, nnx.Rngs(0)), nnx.Param)
            return params, lambda params, x: nnx.merge(graph, params)(x)
        model = LinenBlock(dot)
        return model.init(jax.random.key(0), x), model.apply

    def run(dot):
        params, apply = build(dot)
        return jax.jit(jax.grad(lambda p, x: jnp.sum(apply(p, x) ** 2), argnums=(0, 1))), params

    exact, params = run(no_dot)
    want = exact(params, x)
    with jax.set_mesh(mesh):
        compressed, params = run(compressed_dot)
        compiled = compressed.lower(params, *place(mesh, [x], [P("dp")])).compile()
        check(compiled(params, *place(mesh, [x], [P("dp")])), want)
    check_sent(compiled)
    messages = [opcode for opcode, dtype, _ in hlo.collectives(compiled) if dtype == "uint8"]
    assert len(messages) == 2 * 4, "two hops of four sums"


@pytest.mark.slow
def test_layers_in_a_scan_of_flax():
    class Layer(nn.Module):
        dot: object

        @nn.compact
        def __call__(self, x, _):
            return x + jnp.tanh(nn.Dense(D, **self.dot("row"))(x)), None

    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
    make = lambda dot: nn.scan(nn.remat(Layer, prevent_cse=False), **axes)(dot)
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, D)).astype(np.float32)
    variables = make(no_dot).init(jax.random.key(0), x, None)

    def gradients(dot):
        loss = lambda variables, x: jnp.sum(make(dot).apply(variables, x, None)[0] ** 2)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x)

    want = gradients(no_dot)
    with jax.set_mesh(make_mesh(dp=DP, tp=TP)):
        check(gradients(compressed_dot), want, 0.05)


def test_a_kernel_that_another_axis_cuts_is_gathered_and_its_gradient_scattered():
    mesh = make_mesh(dp=DP, tp=TP, explicit=True)
    dot = functools.partial(taco_jax.dot, axis="tp", compression="int8h")
    with jax.set_mesh(mesh):
        x, kernel = place(mesh, data(CASES["row"]), (P("dp"), P("tp", "dp")))
        (_, y), both = jax.jit(gradients(dot))(x, kernel)
    assert jax.typeof(both[1]).sharding.spec == P("tp", "dp")
    check((y, both), unsharded("row"))


def test_a_layer_finds_the_kind_in_its_types():
    mesh = make_mesh(dp=DP, tp=TP, explicit=True)
    dot = taco_jax.dot_general("tp", compression="int8h")
    with jax.set_mesh(mesh):
        column, row = (
            nnx.Linear(D, D, dot_general=dot, kernel_metadata={"out_sharding": spec}, rngs=nnx.Rngs(0))
            for spec in ((None, "tp"), ("tp", None))
        )
        x = jax.device_put(np.ones((BATCH, LENGTH, D), np.float32), NamedSharding(mesh, P("dp")))
        y = jax.jit(lambda m, x: m(x))(column, x)
        assert jax.typeof(y).sharding.spec == P("dp", None, "tp")
        run = jax.jit(lambda row, y: row(y))
        assert "uint8" in {dtype for _, dtype, _ in hlo.collectives(run.lower(row, y).compile())}
        z = run(row, y)
    assert jax.typeof(z).sharding.spec in (P("dp", None, None), P("dp"))
    want = np.asarray(y) @ np.asarray(row.kernel[...])
    assert 0 < relative(z, want) < 0.02


def test_exact_where_nothing_is_split():
    mesh = make_mesh(dp=DP, tp=TP, explicit=True)
    x, kernel = data(CASES["row"])
    numbers = CASES["row"][1]
    dot = taco_jax.dot_general("tp", compression="int8h")
    with jax.set_mesh(mesh):
        x, kernel = place(mesh, (x, kernel), (P("dp"), P()))
        run = jax.jit(lambda x, kernel: dot(x, kernel, numbers))
        np.testing.assert_array_equal(run(x, kernel), jax.jit(lambda x, k: lax.dot_general(x, k, numbers))(x, kernel))
        assert hlo.collectives(run.lower(x, kernel).compile()) == []
    local, mesh = lambda x, kernel: dot(x, kernel, numbers), make_mesh(dp=DP, tp=TP)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp")))
    assert hlo.collectives(run.lower(np.asarray(x), np.asarray(kernel)).compile()) == []


def test_dot_is_tensordot():
    mesh = make_mesh(dp=DP, tp=TP)
    x, kernel = data(CASES["of_heads"])
    options = {"compression": "int8h", "mesh": mesh}
    y = jax.jit(lambda x, w: taco_jax.dot(x, w, "tp", kind="row", contract=2, **options))(x, kernel)
    assert 0 < relative(y, np.tensordot(x, kernel, 2)) < 0.02
    x, kernel = data(CASES["to_heads"])
    y = jax.jit(lambda x, w: taco_jax.dot(x, w, "tp", kind="column", **options))(x, kernel)
    assert relative(y, np.tensordot(x, kernel, 1)) < 1e-5


def test_dtypes_and_the_table():
    mesh = make_mesh(dp=DP, tp=TP)
    x, kernel = data(CASES["row"])
    dot = functools.partial(taco_jax.dot, axis="tp", compression="taco", kind="row", mesh=mesh)
    assert jax.eval_shape(dot, x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert jax.eval_shape(dot, x.astype(jnp.bfloat16), kernel).dtype == jnp.float32
    wide = functools.partial(dot, preferred_element_type=jnp.float32)
    with comm_log.record() as table:
        assert jax.eval_shape(wide, *(a.astype(jnp.bfloat16) for a in (x, kernel))).dtype == jnp.float32
    (row,) = [row for row in table.rows() if row.kind == "activation"]
    assert (row.site, row.codec, row.dtype) == ("dot", "taco", "float32")
    assert row.elements == BATCH // DP * LENGTH * 64


def test_sequence_parallelism():
    mesh = make_mesh(dp=DP, tp=TP)
    x, kernel = data(CASES["row"])
    kernel /= 16
    down = np.random.default_rng(1).normal(size=(64, D)).astype(np.float32) / 8

    def mlp(x, kernel, down, **options):
        h = taco_jax.dot(x, kernel, "tp", kind="column", mesh=mesh, **options)
        return jnp.sum(taco_jax.dot(jnp.tanh(h), down, "tp", kind="row", mesh=mesh, **options) ** 2)

    grad = lambda **options: jax.jit(jax.grad(functools.partial(mlp, **options), argnums=(0, 1, 2)))
    want = grad(compression=None)(x, kernel, down)
    run = grad(compression="int8h", sequence_dim=1)
    compiled = run.lower(*place(mesh, (x, kernel, down), (P("dp", "tp"), P(None, "tp"), P("tp")))).compile()
    check(run(x, kernel, down), want, 0.05)
    sent = [opcode for opcode, dtype, _ in hlo.collectives(compiled) if dtype == "uint8"]
    assert sorted(sent) == ["all-gather"] * 2 + ["all-to-all"] * 2


def test_equal_options_are_one_program():
    make = lambda codec: taco_jax.dot_general("tp", compression=codec, kind="row", batch_axes=["dp"])
    assert make("taco") == make("taco") != make("int8h") and hash(make("taco")) == hash(make("taco"))
    assert make("taco") == make("taco:taco")


BAD = [
    ({"kind": "diagonal"}, {}, ValueError, "kind='diagonal'"),
    ({"kind": None}, {}, ValueError, "axis 'tp' is of type Auto, .* pass kind='row' .* kind='column'"),
    ({"axis": "tensor"}, {}, ValueError, "axis='tensor'"),
    ({"axis": ("dp", "tp")}, {}, TypeError, "axis=.*: must be the name of a mesh axis"),
    ({"compression": "tacoo"}, {}, ValueError, "did you mean 'taco'"),
    ({"compression": taco_jax.Compression("int4h", error_feedback=True)}, {}, ValueError, "error_feedback=True"),
    ({"kernel_dim": 1}, {}, ValueError, r"kernel_dim=1: kind='row' of a kernel of shape \(256, 64\) .* dims 0"),
    ({"kernel_dim": "a"}, {}, TypeError, "kernel_dim='a': is of type str; must be an integer, a dim, or None"),
    ({"sequence_dim": 2}, {}, ValueError, r"sequence_dim=2: .* valid are \[0, 1\]"),
    ({"batch_axes": "tp"}, {}, ValueError, "batch_axes='tp'"),
    ({"site": "x"}, {"x": (3, 8, 256)}, ValueError, r"dim 0 of x has size 3 .* multiple of 2"),
    ({"site": "x"}, {"kernel": (250, 64), "x": (4, 8, 250)}, ValueError, "dim 0 of the kernel=250: .* multiple of 4"),
    ({"site": "x"}, {"kernel": (128, 64)}, ValueError, r"dims \(2,\) of x must have the sizes of dims \(0,\) of the"),
    ({"mesh": None}, {}, ValueError, "dot_general has no mesh: pass mesh="),
]  # fmt: skip


@pytest.mark.parametrize(("options", "shapes", "error", "message"), BAD)
def test_bad_input(options, shapes, error, message):
    options = {"axis": "tp", "compression": "taco", "kind": "row", "mesh": make_mesh(dp=DP, tp=TP)} | options
    shapes = {"x": (4, 8, 256), "kernel": (256, 64)} | shapes
    x, kernel = (np.ones(shapes[name], np.float32) for name in ("x", "kernel"))
    with pytest.raises(error, match=message) as caught:
        taco_jax.dot_general(**options)(x, kernel, (((2,), (0,)), ((), ())))
    assert "\n" not in str(caught.value)


def test_bad_contract():
    with pytest.raises(ValueError, match="contract=3: .* must be from 1 to 2"):
        taco_jax.dot(np.ones((2, 3)), np.ones((2, 3)), "tp", compression="taco", contract=3)


def test_regions_and_types_that_cannot_be():
    mesh = make_mesh(dp=DP, tp=TP)
    x, kernel = data(CASES["row"])
    dot = functools.partial(taco_jax.dot, axis="tp", compression="taco")
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("dp", None, "tp"), P("tp")), out_specs=P("dp"))
    with pytest.raises(ValueError, match="dot_general: the region was made with check_vma=False"):
        shard(functools.partial(dot, kind="row"), check_vma=False)(x, kernel)
    with pytest.raises(ValueError, match="dot_general: axis 'tp' is not a manual mesh axis here"):
        jax.jit(jax.shard_map(dot, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"}))(x, kernel)
    with pytest.raises(ValueError, match=r"kind='column'\) inside jax.shard_map: x differs between the devices"):
        jax.shard_map(
            functools.partial(dot, kind="column"), mesh=mesh, in_specs=(P("dp", "tp"), P(None, "tp")), out_specs=P("dp")
        )(x, kernel)
    with pytest.raises(ValueError, match="sequence_dim=1 inside jax.shard_map: .* pass kind='row' or kind='column'"):
        shard(functools.partial(dot, sequence_dim=1))(x, kernel)
    mesh = make_mesh(dp=DP, tp=TP, explicit=True)
    with jax.set_mesh(mesh):
        for specs, message in (
            ((P(None, None, "tp"), P(None, "tp")), "splits what is summed over in one operand and another dim"),
            ((P(None, "tp"), P("tp")), r"dim 1 of x is split over axis 'tp' .* or sequence_dim=1"),
            ((P(None, None, "dp"), P("tp")), r"features of x are split over \['dp'\] .* not the layer's axis 'tp'"),
        ):
            with pytest.raises(ValueError, match=message):
                dot(*place(mesh, (x, kernel), specs))
