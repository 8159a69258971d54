"""A stage's parts and work: its layers, and on the first and the last stage the ends of the model.

Layers stay one stacked array over all stages; each rank of pp holds the n_layers / pp of its stage. Embedding, final
norm and head are whole on every stage and used on one: their gradients are summed over pp, once (`sum_over_stages`),
which also adds both uses of a tied table.

Dims: B batch, L length, D model; V chunks and N layers of a chunk in the shapes of what belongs to layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compat import varying_axes
from taco_jax.compression.site_scales import SiteScales
from taco_jax.config.schedule import Schedule
from taco_jax.models import decoder, lora
from taco_jax.models.attention import windows_of
from taco_jax.models.blocks import norm
from taco_jax.models.config import ModelConfig
from taco_jax.models.projections import State
from taco_jax.models.run_config import Parallel
from taco_jax.pipeline.send import AXIS
from taco_jax.tensor_parallel import to_varying


def used_once(params: Any, base: Any, config: ModelConfig, par: Parallel) -> tuple[Any, Callable, Any]:
    """Returns (params as layers use them, the pullback of their gradients, base).

    Sums over tp of what its ranks hold whole are in the pullback, and so are taken once, after all ticks.

    Args:
      base: parameters without gradients, for which params are adapters (`lora.join`). They come back as layers use
        them too.
    """
    used = lambda params: decoder.use_replicated_params(lora.join(base, params), config, par)
    if base:
        return jax.vjp(lambda params: lora.split(used(params)), params, has_aux=True)
    return *jax.vjp(used, params), base


def is_first() -> jax.Array:
    return lax.axis_index(AXIS) == 0


def is_last() -> jax.Array:
    return lax.axis_index(AXIS) == lax.axis_size(AXIS) - 1


def where_true(predicate, function: Callable[[], Any], axes) -> Any:
    """function() where the predicate holds, zeros on the ranks where it does not, which compute and send nothing.

    The predicate must be the same on all ranks that function's collectives join. Results vary over `axes`.
    """
    shapes = jax.eval_shape(function)
    result = lambda: jax.tree.map(lambda y: to_varying(y, axes), function())
    zeros = lambda: jax.tree.map(lambda y: to_varying(jnp.zeros(y.shape, y.dtype), axes), shapes)
    return lax.cond(predicate, result, zeros)


def nothing(tokens_BL: jax.Array, config: ModelConfig, par: Parallel, schedule: Schedule) -> jax.Array:
    """Zeros of the shape of one microbatch's activations, of the tokens of all."""
    length = tokens_BL.shape[1] // (lax.axis_size(par.axis) if par.sequence_parallel else 1)
    return jnp.zeros((tokens_BL.shape[0] // schedule.microbatches, length, config.d_model), par.dtype)


def in_chunks(layers: Any, schedule: Schedule) -> Any:
    """This stage's layers, [V, N, ...] also where there is one chunk, of which a state has no dim."""
    return layers if schedule.chunks > 1 else jax.tree.map(lambda leaf: leaf[None], layers)


def out_of_chunks(layers: Any, schedule: Schedule) -> Any:
    """The inverse of `in_chunks`."""
    return layers if schedule.chunks > 1 else jax.tree.map(lambda leaf: leaf[0], layers)


def own(a: jax.Array, chunks: int) -> jax.Array:
    """The part of [n_layers, ...] that belongs to this stage, [V, N, ...].

    The cotangent of the whole is zero for the layers of other stages, so one maximum over devices still serves all.
    """
    a = a.reshape(chunks, -1, *a.shape[1:])
    size = a.shape[1] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(a, lax.axis_index(AXIS) * size, size, axis=1)


def own_scales(state: State, chunks: int) -> dict[str, SiteScales | None]:
    """The scales of this stage's layers, each array `own`'s part of it."""
    return {site: jax.tree.map(lambda a: own(a, chunks), state.get(site)) for site in decoder.LAYER_SITES}


def own_windows(config: ModelConfig, chunks: int) -> jax.Array | None:
    """Which of this stage's layers have the sliding window, [V, N]; None where all layers are alike."""
    windows = windows_of(config)
    return None if windows is None else own(windows, chunks)


def own_share(a_B: jax.Array, schedule: Schedule) -> jax.Array:
    """This stage's part of a batch that all stages have, [B / S, ...]."""
    size = len(a_B) // schedule.stages
    return lax.dynamic_slice_in_dim(a_B, lax.axis_index(AXIS) * size, size)


def share_of_last(y_BLD: jax.Array, schedule: Schedule) -> jax.Array:
    """`own_share` of a batch that the last stage alone has. One exact message, and one of its gradient."""
    y_SBLD = y_BLD.reshape(schedule.stages, -1, *y_BLD.shape[1:])
    for direction in ("forward", "backward"):
        comm_log.exact("pp/head", direction, "all_to_all", AXIS, y_SBLD, kind="activation")
    return lax.all_to_all(y_SBLD, AXIS, split_axis=0, concat_axis=0)[-1]


def sum_over_stages(total: jax.Array, grads: Mapping[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    """(loss, gradients): what each stage has its own part of summed, the loss and whatever is in no layer."""
    shared = {name: value for name, value in grads.items() if name != "layers"}
    if size := sum(leaf.size for leaf in jax.tree.leaves(shared)):  # adapters are in layers alone
        comm_log.exact("pp/grads", "backward", "psum", AXIS, jax.ShapeDtypeStruct((size,), jnp.float32))
    comm_log.exact("pp/loss", "backward", "psum", AXIS, total)
    return lax.psum(total, AXIS), dict(grads, **lax.psum(shared, AXIS))


def head_loss(params, x_BLD: jax.Array, targets_BL, weights_BL, config: ModelConfig, par: Parallel, state: State):
    """`decoder.head_loss` of what the last stage's layers made."""
    x_BLD = norm(x_BLD, params["final_norm"], config)
    return decoder.head_loss(params, x_BLD, targets_BL, weights_BL, config=config, par=par, state=state)


def activation_axes(params, par: Parallel) -> frozenset[str]:
    """The axes over which activations between layers vary: the parameters' but for tp, which only sequence parallelism
    adds."""
    axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(params)))
    return axes | {par.axis} if par.sequence_parallel else axes - {par.axis}
