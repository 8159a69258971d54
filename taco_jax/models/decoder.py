"""The decoder: pure functions on a tree of parameters, run inside a shard_map that is manual over all mesh axes.

    init = jit(lambda key: init_params(config, key, tp), out_shardings=...)    # global sizes, cut as `param_specs` says
    shard_map(lambda ...: loss(params, tokens, ...), in_specs=(param_specs(config, tp), P("dp"), ...), check_vma=True)

Layers are stacked and scanned, so a model of any depth compiles as one layer. Parameters come in float32 and are cast
inside the layer. Activations are sent before and after the attention and the mlp of every layer, after the embedding
and before the head (`site_names`).

Dims: B batch, L length (L / tp between matrix products under sequence parallelism), D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compat import varying_axes
from taco_jax.models.attention import Attend, causal, contexts, windows_of
from taco_jax.models.blocks import attention, kv_replicated, mlp, norm
from taco_jax.models.config import ModelConfig, validate
from taco_jax.models.documents import documents, positions_in_documents
from taco_jax.models.lora import Adapted, use_replicated_adapter
from taco_jax.models.overlap import (
    Sublayer,
    chain_count,
    chained_layer,
    join_batch,
    join_streams,
    one_chain_layer,
    overlapped_layer,
    split_batch,
    split_stream,
    through_overlapped_layers,
)
from taco_jax.models.params import count_params, init_params, param_specs
from taco_jax.models.projections import ResidualStream, State, fed_column_input, init_stream
from taco_jax.models.run_config import Parallel, own_rows, remat, use_replicated
from taco_jax.nn import vocab_parallel
from taco_jax.tensor_parallel import to_varying

__all__ = [
    "count_params", "embed", "forward", "sublayers", "head_logits", "head_loss", "head_score", "init_params", "layers",
    "logits", "loss", "param_specs", "site_names", "use_replicated_params",
]  # fmt: skip

Params = Mapping[str, Any]

LAYER_SITES = ("layers/attn/qkv", "layers/attn/out", "layers/mlp/up", "layers/mlp/down")
NORMS_OF_SITES = {"attn_norm": "layers/attn/qkv", "mlp_norm": "layers/mlp/up", "final_norm": "head"}


def site_names(config: ModelConfig, tp: int) -> tuple[str, ...]:
    """Every place that sends activations. A site in layers is one name for all of them."""
    validate(config, tp)
    return ("embed", *LAYER_SITES, "head")


def forward(params: Params, tokens_BL: jax.Array, config: ModelConfig, par: Parallel, state: State) -> jax.Array:
    """The final normalisation's output, x_BLD in par.dtype; this rank's part of L under sequence parallelism.

    Args:
      params: local shards of `init_params`, float32.
      tokens_BL: int32 ids, the same on all ranks of par.axis. An id outside the vocabulary gives NaN.
      state: site scales, see `State`.

    Raises:
      ValueError: L is longer than the learned positions, or sequence parallelism cannot cut it.
    """
    params = use_replicated_params(params, config, par)
    x_BLD = embed(params, tokens_BL, config, par, state)
    documents_BL = documents(tokens_BL, par.end_token)
    stream = through_layers(
        params["layers"], x_BLD, tokens_BL.shape[1], config, par=par, state=state, documents_BL=documents_BL
    )
    return after_layers(params, stream, config, par, state)


def after_layers(params: Params, stream: ResidualStream, config: ModelConfig, par: Parallel, state: State) -> jax.Array:
    """Returns `forward`'s result of the stream after the layers."""
    x_BLD = stream.x_BLD
    if par.feeds_gradients_back("head"):
        x_BLD, _ = fed_column_input(x_BLD, stream.carrier_BLD, par, state, "head")
    return norm(x_BLD, params["final_norm"], config)


def embed(params: Params, tokens_BL: jax.Array, config: ModelConfig, par: Parallel, state: State,
          positions_BL: jax.Array | None = None) -> jax.Array:  # fmt: skip
    """Returns the first layer's input, x_BLD in par.dtype, from parameters that `use_replicated_params` made ready.

    `positions_BL` (default: 0 to L - 1 in each sequence, or in each document where par.end_token ends them) are of the
    whole sequences.
    """
    _check_length(tokens_BL.shape[1], config, par)
    x_BLD = vocab_parallel.embed(
        params["embed"]["table"], tokens_BL, par.axis, par.compression("embed"), state.get("embed"),
        vocab_size=config.vocab_size, sequence_dim=par.sequence_dim, dtype=par.dtype, site="embed",
    )  # fmt: skip
    if config.scale_embedding:
        x_BLD *= jnp.asarray(config.d_model**0.5, x_BLD.dtype)
    if config.positions == "learned":
        positions = params["embed"]["positions"]
        if positions_BL is None and par.end_token is not None:
            positions_BL = positions_in_documents(documents(tokens_BL, par.end_token))
        if positions_BL is None:
            positions = positions[: tokens_BL.shape[1]]
            if par.sequence_parallel:
                positions = own_rows(positions, par.axis, "embed/positions", frozen=par.frozen)
        else:
            if par.sequence_parallel:
                positions = use_replicated(positions, par.axis, "embed/positions", frozen=par.frozen)
                rows = positions_BL.shape[1] // lax.axis_size(par.axis)
                own = lax.axis_index(par.axis) * rows
                positions_BL = lax.dynamic_slice_in_dim(positions_BL, own, rows, axis=1)
            positions = positions[positions_BL]
        x_BLD = (x_BLD.astype(jnp.float32) + positions).astype(x_BLD.dtype)
    return x_BLD


def layers(stacked: Params, x_BLD: jax.Array, length: int, config: ModelConfig, **others: Any) -> jax.Array:
    """The x_BLD of `through_layers`, for stages."""
    return without_errors(through_layers(stacked, x_BLD, length, config, **others))


def without_errors(stream: ResidualStream) -> jax.Array:
    """The x_BLD of a stream that leaves a stage.

    Raises:
      ValueError: gradients' sums are to take errors along, which stages do not hand on.
    """
    if stream.carrier_BLD is not None:
        raise ValueError("backward_error_feedback=True: stages hand no errors on; leave it out, or use no stages")
    return stream.x_BLD


def through_layers(stacked: Params, x_BLD: jax.Array, length: int, config: ModelConfig, par: Parallel, state: State,
           documents_BL: jax.Array | None = None, windows: jax.Array | None = None) -> ResidualStream:  # fmt: skip
    """The stream after the layers of `stacked`, any number of the model's; made ready as in `embed`.

    Args:
      length: L of the whole sequence.
      state: of the sites in layers, with a leading dim as long as that of `stacked`.
      documents_BL: as in `documents`, of the whole sequence.
      windows: which of the layers have the sliding window, as in `windows_of`; by default `stacked` are all layers.
    """
    windows = windows_of(config) if windows is None else windows
    loop = layer_loop(len(x_BLD), length, config, par, documents_BL=documents_BL)
    layer_state = {site: state.get(site) for site in LAYER_SITES}
    # The carry's type must not change in the loop: with parameters that vary over dp, x does from the start.
    x_BLD = to_varying(x_BLD, _varying(stacked) - {par.axis})
    carried, count = loop.enter(x_BLD), len(jax.tree.leaves(stacked)[0])
    with comm_log.repeat(count * loop.chains):
        if count > 1 and loop.overlaps(carried):
            carried = loop.through(carried, stacked, layer_state, windows)
        else:
            one = lambda carried, of: (loop.layer(carried, *of), None)
            carried, _ = lax.scan(one, carried, (stacked, layer_state, windows))
    return loop.leave(carried)


class LayerLoop(NamedTuple):
    """A loop over layers.

    enter: x_BLD -> what layers carry. layer: (carried, a layer's parameters, its sites' scales, whether it has the
    sliding window or None) -> carried. leave: carried -> the stream. chains: the parts of the batch, each a use of
    every site. overlaps: carried -> whether layers are `overlapped_layer`s. through: `layer` of several such, stacked.
    """

    enter: Callable[[jax.Array], Any]
    layer: Callable[[Any, Any, State, Any], Any]
    leave: Callable[[Any], ResidualStream]
    chains: int
    overlaps: Callable[[Any], bool]
    through: Callable[[Any, Any, State, Any], Any]


def layer_loop(batch: int, length: int, config: ModelConfig, par: Parallel,
               documents_BL: jax.Array | None = None) -> LayerLoop:  # fmt: skip
    """Returns the loop of `through_layers` for x_BLD of `batch` sequences."""
    both = sublayers(config, par, causal(config, par))
    parts = chain_count(batch, par.chains)
    of_chains = split_batch(documents_BL, parts) if documents_BL is not None else (None,) * parts
    shared = [contexts(config, jnp.arange(length), own_BL) for own_BL in of_chains]
    in_context = lambda sliding: tuple(make(sliding) for make in shared)

    def enter(x_BLD):
        column_sites = (*(sublayer.in_site for sublayer in both), "head")
        stream = init_stream(x_BLD, par, (sublayer.out_site for sublayer in both), column_sites)
        if parts > 1 and not par.sequence_parallel and stream.carrier_BLD is None:
            return split_stream(stream, parts)
        carries_errors = stream.error_BLD is not None or stream.carrier_BLD is not None
        return stream if carries_errors else split_batch(x_BLD, parts)

    def overlaps(carried):
        return not isinstance(carried, ResidualStream) and isinstance(carried[0], ResidualStream)

    def layer(carried, params, state, sliding):
        if isinstance(carried, ResidualStream):  # a tuple too
            return remat(one_chain_layer(both, par), par.remat)(carried, params, state, in_context(sliding)[0])
        if overlaps(carried):
            return overlapped_layer(both, par)(carried, None, params, state, in_context(sliding))[0]
        return remat(chained_layer(both, par), par.remat)(carried, params, state, in_context(sliding))

    def through(streams, stacked, state, windows):
        return through_overlapped_layers(
            both, par, streams, stacked=stacked, state=state, shared_of=in_context, windows=windows
        )

    def leave(carried):
        # What the last sum loses stays behind: a message for it would cost as much as four of 4 bits.
        if isinstance(carried, ResidualStream):
            return carried
        return join_streams(carried) if overlaps(carried) else ResidualStream(join_batch(carried))

    return LayerLoop(enter, layer, leave, parts, overlaps=overlaps, through=through)


def sublayers(
    config: ModelConfig, par: Parallel, attend: Attend, sites_of: str = "layers"
) -> tuple[Sublayer, Sublayer]:
    """A layer's attention and mlp, whose sites' names begin with `sites_of`; they share the `Context`."""
    normalise = lambda x_BLD, p: norm(x_BLD, p, config)
    return (
        Sublayer(
            normalise, lambda h_BLD, p, context: attention(h_BLD, p, context, config, par=par, attend=attend),
            "attn_norm", "attn", out_name="out", in_site=f"{sites_of}/attn/qkv", out_site=f"{sites_of}/attn/out",
            post_norm_name="attn_post_norm" if config.post_norms else None,
        ),
        Sublayer(
            normalise, lambda h_BLD, p, _: mlp(h_BLD, p, config, par),
            "mlp_norm", "mlp", out_name="down", in_site=f"{sites_of}/mlp/up", out_site=f"{sites_of}/mlp/down",
            post_norm_name="mlp_post_norm" if config.post_norms else None,
        ),
    )  # fmt: skip


def loss(params: Params, tokens_BL: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, config: ModelConfig,
         par: Parallel, state: State) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(sum of weighted negative log-likelihoods in nats, sum of weights) of the local batch: float32 scalars.

    Both are the same on all ranks of par.axis and differ over the axes over which tokens do. Arguments as in `forward`;
    targets_BL and weights_BL as in `vocab_parallel.cross_entropy`.
    """
    x_BLD = forward(params, tokens_BL, config, par, state)
    return head_loss(params, x_BLD, targets_BL, weights_BL, config=config, par=par, state=state)


def head_loss(params: Params, x_BLD: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, config: ModelConfig,
              par: Parallel, state: State) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`loss` of an x_BLD that the final normalisation has made."""
    return vocab_parallel.cross_entropy(
        x_BLD, _head(params, config), targets_BL, weights_BL, axis=par.axis, compression=par.compression("head"),
        scales=state.get("head"), vocab_size=config.vocab_size, chunk=par.loss_chunk, sequence_dim=par.sequence_dim,
        precision=par.precision, softcap=config.logit_softcap, site="head",
    )  # fmt: skip


def logits(params: Params, tokens_BL: jax.Array, config: ModelConfig, par: Parallel, state: State) -> jax.Array:
    """Logits of every position, float32[B, L, vocab_size], the same on all ranks: for tests and sampling."""
    return head_logits(params, forward(params, tokens_BL, config, par, state), config, par, state)


def head_logits(params: Params, x_BLD: jax.Array, config: ModelConfig, par: Parallel, state: State) -> jax.Array:
    """`logits` of an x_BLD that the final normalisation has made."""
    return vocab_parallel.logits(
        x_BLD, _head(params, config), par.axis, par.compression("head"), state.get("head"),
        vocab_size=config.vocab_size, sequence_dim=par.sequence_dim, precision=par.precision,
        softcap=config.logit_softcap, site="head",
    )  # fmt: skip


def head_score(params: Params, x_BLD: jax.Array, targets_BL: jax.Array, config: ModelConfig,
               par: Parallel) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(negative log-likelihoods float32[B, L], most likely ids int32[B, L]) of an x_BLD as in `head_logits`."""
    return vocab_parallel.score(
        x_BLD, _head(params, config), targets_BL, par.axis, vocab_size=config.vocab_size, precision=par.precision,
        softcap=config.logit_softcap,
    )  # fmt: skip


def head_logprobs(params: Params, x_LD: jax.Array, targets_L: jax.Array, config: ModelConfig, par: Parallel,
                  top: int) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """`vocab_parallel.logprobs` of one sequence of an x_BLD as in `head_logits`."""
    return vocab_parallel.logprobs(
        x_LD, _head(params, config), targets_L, par.axis, vocab_size=config.vocab_size, top=top,
        precision=par.precision, softcap=config.logit_softcap,
    )  # fmt: skip


def _head(params: Params, config: ModelConfig) -> jax.Array:
    return params["embed"]["table"].T if config.tied_head else params["head"]["kernel"]


def use_replicated_params(params: Params, config: ModelConfig, par: Parallel) -> Params:
    """The parameters, those that are whole on every rank made varying where they meet values that differ between ranks.

    With whole sequences these are the weights of replicated kv heads and of qk-norm; under sequence parallelism also
    every norm and every bias added after a reduction. (Learned positions take `own_rows`.) Norms before products whose
    input gradients are fed back are among them: each rank has its own part of their gradients.
    Of adapters it is always the one of both matrices that is not cut.
    """
    tp = lax.axis_size(par.axis)
    alone = {"q_norm", "k_norm"} | ({"k", "v"} if kv_replicated(config, tp) else set())
    alone |= {name for name, site in NORMS_OF_SITES.items() if par.feeds_gradients_back(site)}

    def use(path, param, spec):
        names = [entry.key for entry in path]
        if isinstance(param, Adapted):
            param = use_replicated_adapter(param, spec, par.axis, "/".join(names[:-1]))
            return param._replace(kernel=use(path, param.kernel, spec))
        meets_varying = names[0] != "embed" and (par.sequence_parallel or alone & set(names))
        if not meets_varying or any(spec):
            return param
        return use_replicated(param, par.axis, "/".join(names), frozen=par.frozen)

    specs = param_specs(config, tp, par.axis)
    return jax.tree_util.tree_map_with_path(use, params, specs, is_leaf=lambda node: isinstance(node, Adapted))


def _varying(tree: Any) -> frozenset[str]:
    return frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))


def _check_length(length: int, config: ModelConfig, par: Parallel) -> None:
    tp = lax.axis_size(par.axis)
    if config.positions == "learned" and length > config.max_length:
        raise ValueError(
            f"sequence length {length}: the learned positions end at max_length={config.max_length}; use at most that"
        )
    if par.sequence_parallel and length % tp:
        low = length // tp * tp
        tries = f"{low} or {low + tp}" if low else str(tp)
        raise ValueError(f"sequence length {length}: sequence parallelism needs tp {tp} to divide it; try {tries}")
