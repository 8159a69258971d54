"""Programs that know nothing of taco_jax: plain jit, sharded arrays, the compiler's own collectives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hlo import collectives
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax

# What hides sums and slices from the hook on CPU. On CUDA it runs before these passes.
UNFUSED = {"xla_disable_hlo_passes": "fusion,fusion-wrapper,cpu-all-reduce-combiner,all-reduce-reassociate"}
WIDTH, HIDDEN, TOKENS, LAYERS = 256, 512, 128, 3
_places = itertools.count()


def mesh(kind=AxisType.Auto, **axes):
    """A mesh of the first devices, with these axes."""
    sizes = tuple(axes.values())
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))


def mesh_between_processes():
    """Data 2 x tensor 4 of two processes' 8 devices. Each row of tensor lies in both: all sums go between them."""
    devices = np.array(jax.devices()).reshape(2, 2, 2).transpose(1, 0, 2).reshape(2, 4)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def sharded(on, x, *spec):
    return jax.device_put(x, NamedSharding(on, P(*spec)))


def weights(on, dtype=jnp.bfloat16, up=(None, None, "tensor"), down=(None, "tensor", None), tokens=("data",)):
    """(weights of `LAYERS` MLPs, activations), sharded over axes data and tensor."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = (
        sharded(on, jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN), dtype) * WIDTH**-0.5, *up),
        sharded(on, jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH), dtype) * HIDDEN**-0.5, *down),
    )
    return ws, sharded(on, jax.random.normal(keys[2], (TOKENS, WIDTH), dtype), *tokens)


def layer(on, x, w_up, w_down):
    y = jax.nn.gelu(x @ w_up) @ w_down
    return x + jax.lax.with_sharding_constraint(y, NamedSharding(on, P("data", None)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def own_rule(on, x, w_up, w_down):
    return layer(on, x, w_up, w_down)


own_rule.defvjp(
    lambda on, *args: (layer(on, *args), args),
    lambda on, args, g: jax.vjp(functools.partial(layer, on), *args)[1](g),
)
BODIES = {
    "remat": lambda on: jax.checkpoint(functools.partial(layer, on)),
    "custom_vjp": lambda on: functools.partial(own_rule, on),
}


def loss(on, ws, x, *, kind="remat"):
    body = BODIES[kind](on)
    x, _ = jax.lax.scan(lambda x, w: (body(x, *w), None), x, ws)
    return (x.astype(jnp.float32) ** 2).mean()


def step(on, kind="remat", **options):
    """jit of loss and gradients, of a name of its own."""
    return jax.jit(fresh(jax.value_and_grad(functools.partial(loss, on, kind=kind), argnums=(0, 1))), **options)


def fresh(f, name="program"):
    """`f` under a name of its own, so that no cache knows it and reports tell it from others."""
    g = lambda *args: f(*args)
    g.__name__ = g.__qualname__ = f"{name}_{next(_places)}"
    return g


def difference(exact, ours):
    """(slope, relative error) of every array, the smallest and largest slope and the largest error."""
    slopes, errors = [], []
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(ours), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        slopes.append((a * b).sum() / (a * a).sum())
        errors.append(np.linalg.norm(a - b) / np.linalg.norm(a))
    return min(slopes), max(slopes), max(errors)


def check_close(exact, ours, most=0.03, slope=0.02):
    least, greatest, error = difference(exact, ours)
    assert 1 - slope < least and greatest < 1 + slope and 0 < error < most, (least, greatest, error)


def check_equal(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def u8_share(compiled):
    """The share of the bytes of all collectives of a compiled program that are u8."""
    sizes = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}
    found = collectives(compiled)
    total = sum(sizes[dtype] * n for _, dtype, n in found)
    return sum(n for _, dtype, n in found if dtype == "uint8") / total


def run(f, args, plan, **options):
    """(compiled program, its result, its sites) of f under a plan."""
    with taco_jax.compressed(plan, **options) as report:
        compiled = f.lower(*args).compile()
    return compiled, compiled(*args), sites(report, f)


def sites(report, f):
    """The sites of one program."""
    return [site for site in report.sites if site.program == f"jit_{f.__name__}"]


def share(found):
    """The share of the bytes that a plan names that is compressed."""
    named = [s for s in found if s.named]
    return sum(s.before * s.runs for s in named if s.compressed) / sum(s.before * s.runs for s in named)
