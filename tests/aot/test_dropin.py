"""Programs that are not ours under a plan, as XLA compiles them for H100s: there the hook runs before fusion, before
sums of sums are merged and before a sum and a slice are made a reduce-scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.instructions import collectives, copies, kernels
from aot.topology import devices
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax.dropin import DropInError, compat

WIDTH, HIDDEN, TOKENS, LAYERS = 1024, 4096, 2048, 3


@pytest.fixture(autouse=True)
def for_cuda(monkeypatch):
    """The plugin gets the hook although its backend has no device to start with."""
    xla = compat.transformations()
    register = functools.partial(xla.register_hlo_module_transformation, name=compat.NAME, platforms="cuda")
    monkeypatch.setattr(compat, "register", register)
    monkeypatch.setattr(
        compat, "unregister", lambda: xla.clear_hlo_module_transformation(compat.NAME, platforms="cuda")
    )


def mesh(**axes):
    grid = np.array(devices(int(np.prod(list(axes.values()))))).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def array(on, shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, P(*spec)))


def compile(f, args, plan, **options):
    """(compiled for CUDA under the plan, its sites)."""
    with taco_jax.compressed(plan, **options) as report:
        compiled = f.trace(*args).lower(lowering_platforms=("cuda",)).compile()
    return compiled, report.sites


def large(compiled):
    """(opcode, dtype) of the collectives of a program that are not of a few values."""
    return {(opcode, dtype) for opcode, dtype, elements in collectives(compiled) if elements > 1024}


@pytest.mark.parametrize("link", ["nccl", "nvlink"])
def test_a_stack_of_layers(link):
    codec = taco_jax.Compression("int4h", link=link)
    on = mesh(data=2, tensor=4)
    constraint = NamedSharding(on, P("data", None))

    def layer(x, w):
        y = jax.nn.gelu(x @ w[0]) @ w[1]
        return x + jax.lax.with_sharding_constraint(y, constraint), None

    def loss(ws, x):
        return (jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32) ** 2).mean()

    ws = (
        array(on, (LAYERS, WIDTH, HIDDEN), None, "data", "tensor"),
        array(on, (LAYERS, HIDDEN, WIDTH), None, "tensor", "data"),
    )
    args = ws, array(on, (TOKENS, WIDTH), "data")
    where = jax.tree.map(lambda x: x.sharding, args)
    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), out_shardings=(NamedSharding(on, P()), where))
    compiled, found = compile(f, args, {"tensor": codec, "data": {"reduce_scatter": codec}}, min_bytes=0)
    assert {(s.operation, s.axes, s.direction) for s in found if s.compressed} == {
        ("all_reduce", ("tensor",), "forward"),
        ("all_reduce", ("tensor",), "backward"),
        ("reduce_scatter", ("data",), "backward"),
    }
    assert {(s.dtype, s.runs) for s in found if s.compressed} == {("bfloat16", LAYERS)}
    # Weights are gathered as they are; all else that is sent is u8, by NCCL or inside of kernels.
    sent = {dtype for opcode, dtype in large(compiled) if opcode != "all-gather"}
    assert sent == ({"u8"} if link == "nccl" else set()) and kernels(compiled)


def test_sums_of_sums_are_merged_first():
    on = mesh(data=2, tensor=4)

    def f(x, *ws):
        return sum(jnp.tanh(x @ w).astype(jnp.float32).sum() for w in ws)

    w = array(on, (WIDTH, WIDTH), None, "tensor")
    args = array(on, (TOKENS, WIDTH), "data", None), w, w, w
    compiled, (site,) = compile(
        jax.jit(jax.grad(f)), args, {"tensor": taco_jax.Compression("int8h", link="nccl")}, min_bytes=0
    )
    assert site.operation == "all_reduce" and site.compressed
    assert large(compiled) == {("all-to-all", "u8"), ("all-gather", "u8")}


def test_sums_of_small_gradients_are_one_message():
    """Which XLA would combine, after the hook, if they were exact."""
    on = mesh(data=4)

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return (x.astype(jnp.float32) ** 2).mean()

    args = [array(on, (WIDTH, WIDTH))] * 6, array(on, (TOKENS, WIDTH), "data")
    f = jax.jit(jax.grad(loss))
    exact = f.trace(*args).lower(lowering_platforms=("cuda",)).compile()
    assert [opcode for opcode, _, _ in collectives(exact)] == ["all-reduce"]
    compiled, found = compile(f, args, {"data": taco_jax.Compression("int8h", link="nccl")}, min_bytes=0)
    assert len(found) == 6 and all(site.compressed for site in found)
    assert [opcode for opcode, _, _ in collectives(compiled)] == ["all-gather", "all-to-all"]


def test_windowed_einsum_leaves_permutations():
    """A product and the scatter of its sum become a ring before the hook sees them; an all-reduce stays one."""
    on = mesh(tensor=4)
    codec = taco_jax.Compression("int8h", link="nccl")
    args = array(on, (TOKENS, WIDTH), None, "tensor"), array(on, (WIDTH, WIDTH), "tensor")
    windowed = {"xla_gpu_threshold_for_windowed_einsum_mib": 0}

    def product(*spec, options=windowed):
        f = lambda x, w: jnp.tanh(x) @ w
        return jax.jit(f, out_shardings=NamedSharding(on, P(*spec)), compiler_options=options)

    whole = lambda operation: {(operation, ("tensor",), True)}
    seen = lambda sites: {(s.operation, s.axes, s.compressed) for s in sites}
    for plan in ({"tensor": codec}, {"tensor": {"collective_permute": codec}}):
        compiled, found = compile(product("tensor"), args, plan, min_bytes=0)
        assert seen(found) == whole("collective_permute")
        assert dict(large(compiled)) == {"collective-permute": "u8"}
    for operation in ("all_reduce", "reduce_scatter"):
        with pytest.raises(DropInError, match="nothing was compressed: the plan does not name it$"):
            compile(product("tensor"), args, {"tensor": {operation: codec}}, min_bytes=0)
    # Without it the sum is there, and so is one whose result is not scattered.
    _, found = compile(product("tensor", options={}), args, {"tensor": codec}, min_bytes=0)
    assert seen(found) == whole("reduce_scatter")
    _, found = compile(product(), args, {"tensor": {"all_reduce": codec}}, min_bytes=0)
    assert seen(found) == whole("all_reduce")


def test_gated_layers_whose_features_are_scattered():
    """Gradients of two gates are one reduce-scatter, equal gathers one gather. Each message costs one transposition."""
    on = mesh(data=2, tensor=2)
    scattered = NamedSharding(on, P("data", "tensor"))
    whole = lambda *spec: NamedSharding(on, P(*spec))
    cut = jax.lax.with_sharding_constraint

    def layer(x, w):
        # Shardings that differ in nothing, as MaxText has them.
        inputs = [cut(cut(x, scattered), whole("data", *rest)) for rest in ((), (None,))]
        gates = [y @ w for y, w in zip(inputs, w[:2])]
        return x + cut((jax.nn.silu(gates[0]) * gates[1]) @ w[2], scattered), None

    def loss(ws, x):
        return (jax.lax.scan(jax.checkpoint(layer), x, ws)[0].astype(jnp.float32) ** 2).mean()

    up = array(on, (LAYERS, WIDTH, HIDDEN), None, None, "tensor")
    down = array(on, (LAYERS, HIDDEN, WIDTH), None, "tensor", None)
    args = (up, up, down), array(on, (TOKENS, WIDTH), "data", "tensor")
    where = jax.tree.map(lambda x: x.sharding, args)
    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), out_shardings=(whole(), where))
    codec = taco_jax.Compression("int8h", link="nccl")
    compiled, found = compile(f, args, {"tensor": codec}, min_bytes=0)
    assert sorted((s.operation, s.direction, s.runs) for s in found if s.compressed) == [
        ("all_gather", "backward", LAYERS), ("all_gather", "backward", LAYERS), ("all_gather", "forward", LAYERS),
        ("reduce_scatter", "backward", LAYERS), ("reduce_scatter", "forward", LAYERS),
    ]  # fmt: skip
    transpositions = [i.name for i in copies(compiled, TOKENS * WIDTH // 2) if i.name.startswith("loop_transpose")]
    assert len(transpositions) == 5, transpositions
