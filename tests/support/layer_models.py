"""What the tests of CompressedDense share: one MLP in NNX and Linen, of CompressedDense or of Flax's own layers."""

import re

import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax import AmaxSlot, CompressedDense, SiteScaleState
from taco_jax.nn import linen
from taco_jax.tensor_parallel import REMAT_NAMES

D, F, LAYERS = 64, 128, 2
TWINS = ("nnx", "linen")
KEEP_MESSAGES = jax.checkpoint_policies.save_only_these_names(*REMAT_NAMES)


class NnxMlp(nnx.Module):
    def __init__(self, rngs, **options):
        self.up, self.down = (
            CompressedDense(a, b, kind=kind, rngs=rngs, **options) if options else nnx.Linear(a, b, rngs=rngs)
            for kind, a, b in (("column", D, F), ("row", F, D))
        )

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class LinenMlp(nn.Module):
    options: dict

    @nn.compact
    def __call__(self, x):
        def layer(n, kind, name):
            return linen.CompressedDense(n, kind, name=name, **self.options) if self.options else nn.Dense(n, name=name)

        return layer(D, "row", "down")(nn.gelu(layer(F, "column", "up")(x)))


class NnxStack(nnx.Module):
    """LAYERS residual MLPs, their variables stacked, scanned over."""

    def __init__(self, rngs, **options):
        metadata = {nnx.PARTITION_NAME: None}
        make = nnx.vmap(lambda r: NnxMlp(r, **options), in_axes=0, out_axes=0, transform_metadata=metadata)
        self.layers = make(rngs.split(LAYERS))

    def __call__(self, x):
        metadata = {nnx.PARTITION_NAME: None}

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=metadata)
        @nnx.remat(policy=KEEP_MESSAGES)
        def body(x, layer):
            return x + layer(x)

        return body(x, self.layers)


class LinenLayer(nn.Module):
    options: dict

    @nn.compact
    def __call__(self, x, _):
        return x + nn.remat(LinenMlp, policy=KEEP_MESSAGES)(self.options, name="mlp")(x), None


class LinenStack(nn.Module):
    options: dict

    @nn.compact
    def __call__(self, x):
        collections = {"params": 0, "site_scale": 0, OVERWRITE_WITH_GRADIENT: 0}
        stack = nn.scan(
            LinenLayer, variable_axes=collections, split_rngs={"params": True}, length=LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )  # fmt: skip
        return stack(self.options, name="layers")(x, None)[0]


def build(twin, stack=False, **options):
    """(variables, specs, apply(variables, x)) of the MLP or the stack. No options: the unsharded Flax layers.

    `variables` are a dict: "params", and where there is compression "scales" and "slots".
    """
    if twin == "nnx":
        model = (NnxStack if stack else NnxMlp)(nnx.Rngs(0), **options)
        graph, params, scales, slots = nnx.split(model, nnx.Param, SiteScaleState, AmaxSlot)
        variables = {"params": params, "scales": scales, "slots": slots}
        specs = nnx.get_partition_spec(variables)

        def apply(v, x):
            # copy: what jax.jit has not been given comes from outside its trace, which nnx.scan does not take.
            return nnx.merge(graph, v["params"], v.get("scales", scales), v.get("slots", slots), copy=True)(x)
    else:
        model = (LinenStack if stack else LinenMlp)(options)
        boxed = dict(model.init(jax.random.key(0), jnp.zeros((1, 2, D))))
        names = {"params": "params", "scales": "site_scale", "slots": OVERWRITE_WITH_GRADIENT}
        is_box = lambda node: isinstance(node, nn.Partitioned)
        # nn.unbox would assert that arrays have their sharding already on a mesh with Explicit axes.
        values = jax.tree.map(lambda a: a.value if is_box(a) else a, boxed, is_leaf=is_box)
        pick = lambda tree: {key: tree[name] for key, name in names.items() if name in tree}
        variables, specs = pick(values), pick(nn.get_partition_spec(boxed))

        def apply(v, x):
            return model.apply({names[k]: tree for k, tree in v.items()}, x)

    return variables, specs, apply


def place(variables, specs, mesh):
    return jax.tree.map(lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec)), variables, specs)


def data(batch=8, length=8, dtype=jnp.float32):
    x_BLD, y_BLD = (jax.random.normal(jax.random.key(k), (batch, length, D), dtype) for k in (1, 2))
    return x_BLD, y_BLD


def loss_outside(apply):
    def loss(variables, x_BLD, y_BLD):
        return jnp.mean((apply(variables, x_BLD) - y_BLD) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def loss_inside(apply, mesh, specs, sequence_dim):
    """The same loss, and its gradients but for the scales, taken inside a shard_map over the whole mesh."""
    axes = ("dp",) if sequence_dim is None else ("dp", "tp")
    x_spec = P("dp") if sequence_dim is None else P("dp", "tp")

    def run(variables, x_BLD, y_BLD):
        def body(variables, x, y):
            rest = {k: v for k, v in variables.items() if k != "scales"}
            fixed = {k: v for k, v in variables.items() if k == "scales"}
            loss = lambda v, x: lax.psum(jnp.sum((apply({**v, **fixed}, x) - y) ** 2), axes) / y_BLD.size
            return jax.value_and_grad(loss, argnums=(0, 1))(rest, x)

        outputs = {k: spec for k, spec in specs.items() if k != "scales"}
        in_specs, out_specs = (specs, x_spec, x_spec), (P(), (outputs, x_spec))
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(variables, x_BLD, y_BLD)

    return run


def check_gradients(gradients, reference, compression):
    """The design's criterion, leaf by leaf."""
    paths = lambda tree: [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert paths(gradients) == paths(reference)
    leaves = jax.tree.leaves(reference)
    norm = lambda a: np.linalg.norm(np.asarray(a, np.float64))
    total = np.sqrt(sum(norm(r) ** 2 for r in leaves))
    for got, want in zip(jax.tree.leaves(gradients), leaves, strict=True):
        error, size = norm(np.asarray(got, np.float64) - np.asarray(want, np.float64)), norm(want)
        if compression is None:
            assert error <= 1e-5 * max(size, 1e-4 * total)
        elif size > 1e-2 * total:
            assert error <= 0.15 * size
            assert abs(norm(got) / size - 1) <= 0.05


def collectives(compiled):
    """(opcode, dtype, elements of the output, device groups) of every collective in the compiled HLO."""
    found = []
    pattern = r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\((.*)"
    for shapes, opcode, rest in re.findall(pattern, compiled.as_text()):
        arrays = re.findall(r"([a-z]+\d+)\[([\d,]*)\]", shapes)
        elements = sum(int(np.prod(hlo.numbers(dims))) for _, dims in arrays)
        found.append((opcode, arrays[0][0], elements, sorted(map(sorted, hlo.groups_of(rest)))))
    return found


def by_name(tree):
    """{"up/kernel": array}: the same for NNX and Linen."""
    names = lambda path: [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        "/".join(n for n in names(path) if n not in ("value", "raw_value")): np.asarray(leaf) for path, leaf in flat
    }
