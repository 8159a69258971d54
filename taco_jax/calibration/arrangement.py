"""An order of a decoder's residual channels in which blocks lose less, learned from a text.

A rotated block spreads its error evenly over its channels, with a power in proportion to the block's own. So a channel
that the loss feels loses most where it shares a block with one that holds much. `measure` runs a model on a text and
finds both for every pair of channels, `learn` makes an order of them, `taco_jax.models.arrangement` folds it into the
weights. Sorted by size, blocks lose more, not less: channels that hold much are those that the loss feels.

Dims: S sites (attention's out and mlp's down of each layer in turn), D model, B block, T phases of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from taco_jax.models.config import ModelConfig

BLOCKS = (32, 128)
"""The blocks that a plan's order is made for, both alike: plans mix codecs."""

LEAST_GAIN = 0.05
"""An order that is predicted to take less than this share away is not kept: experiments/results/arrangement_bytes has
a model without outlying channels, where orders are all alike."""


def together(d_model: int, block: int | Sequence[int]) -> np.ndarray:
    """float64[D, D]: the share of tokens in which two places are in one block, over the block's size; of several blocks
    the mean.

    Blocks are runs of the flattened message, so where the block does not divide D its ends move from token to token,
    and a block may have the end of one token and the start of the next.
    """
    if not isinstance(block, int):
        return np.mean([together(d_model, each) for each in block], axis=0)
    places = np.arange(d_model)
    phases = math.lcm(block, d_model) // d_model
    share = np.zeros((d_model, d_model))
    for phase in range(phases):
        own, following = ((phase + token) * d_model + places for token in (0, 1))
        same = own[:, None] // block == own // block
        crossing = own[:, None] // block == following // block
        share += same | crossing | crossing.T
    return share / (phases * block)


def cost(order: Sequence[int], pairs: np.ndarray, block: int | Sequence[int] = BLOCKS) -> float:
    """Returns what a rotated block's error costs in this order, up to a factor of the codec: nats.

    The error of a block is spread evenly over its channels, with a power in proportion to the block's. Each channel c
    then loses g_c^2 times the mean of what its block's channels d hold, which is the sum of `pairs` over c and d.
    """
    return float(np.sum(together(len(pairs), block) * pairs[np.ix_(order, order)]))


def learn(
    pairs: np.ndarray, block: int | Sequence[int] = BLOCKS, start: Sequence[int] | None = None, least: float = 1e-6
) -> np.ndarray:
    """Returns the order that pairwise exchanges from `start` on lead to, the best one each time, for the least `cost`.

    They end where none takes more than this share of the cost away.
    """
    d_model = len(pairs)
    order = np.arange(d_model) if start is None else np.array(start)
    share = together(d_model, block)
    of = ((pairs + pairs.T) / 2)[np.ix_(order, order)]
    by_block = share @ of
    enough = -least * np.sum(share * of)
    alone, upper = share[0, 0], np.triu_indices(d_model, 1)
    for _ in range(100 * d_model):
        own, held = np.diag(of), np.diag(by_block)
        change = by_block + by_block.T - held[:, None] - held + (alone - share) * (own[:, None] + own - 2 * of)
        best = np.argmin(change[upper])
        if 2 * change[upper][best] > enough:
            break
        swapped = [upper[0][best], upper[1][best]]
        before = of[swapped].copy()
        order[swapped] = order[swapped[::-1]]
        of[swapped] = of[swapped[::-1]]
        of[:, swapped] = of[:, swapped[::-1]]
        by_block += share[:, swapped] @ (of[swapped] - before)
        by_block[:, swapped] = share @ of[:, swapped]
    return order


class Sites(NamedTuple):
    """Statistics of the residual's sums, as `measure` finds them.

    terms, sums, gradients: mean squares over tokens, float64[S, D]: of the ranks' own terms, added up over ranks; of
    their sum; of the loss's gradient at the sum, nats of a token.
    pairs: float64[D, D]: mean over tokens of (gradient at a channel)^2 times what is sent in another one squared, added
    up over sites; no token counts for more than `CAP` says. pairs_fed: the same with what the gradient changes by until
    the next sum, which is all that an error costs where that sum takes it along.
    sent, slopes: float32[S, N, tp + 1, D] and [S, N, D]: of some tokens the ranks' terms and, last, their sum; and the
    gradient. slopes_fed: as in pairs_fed.
    """

    terms: np.ndarray
    sums: np.ndarray
    gradients: np.ndarray
    pairs: np.ndarray
    pairs_fed: np.ndarray
    sent: np.ndarray
    slopes: np.ndarray
    slopes_fed: np.ndarray


CAP = 10.0
"""A token counts for at most so many times its site's median in pairs: a few tokens with huge channels, such as a
text's first, would otherwise be all that the order is made for, and no error costs as much as its square says there."""


def _capped(slopes_SLD, squares_SLD):
    """Returns the squared slopes, those of tokens that would cost more than CAP medians made smaller."""
    import jax.numpy as jnp

    cost_SL1 = jnp.sum(slopes_SLD, 2, keepdims=True) * jnp.sum(squares_SLD, 2, keepdims=True)
    cap_S11 = CAP * jnp.median(cost_SL1, 1, keepdims=True)
    return slopes_SLD * jnp.minimum(1.0, cap_S11 / jnp.maximum(cost_SL1, 1e-30))


def measure(config: ModelConfig, mesh: Mesh, params: Any, tokens_WL: np.ndarray, samples: int = 1) -> Sites:
    """Runs windows of tokens, int32[W, L + 1], exactly; `samples` tokens of each are kept, evenly spread."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from taco_jax.inference.forward import contexts_by_layer
    from taco_jax.models import decoder
    from taco_jax.models.attention import causal
    from taco_jax.models.blocks import norm
    from taco_jax.models.params import param_specs
    from taco_jax.models.projections import column_input, reduce_partials, row_partial
    from taco_jax.models.run_config import Parallel

    par = Parallel(dtype=jnp.float32, precision="highest", remat="full")
    tp, length, D = mesh.shape["tp"], tokens_WL.shape[1] - 1, config.d_model
    at = np.linspace(0, length - 1, samples).astype(int)
    both = decoder.sublayers(config, par, causal(config, par))

    def run(params, inputs_BL, targets_BL):
        context = contexts_by_layer(config, jnp.arange(length))

        def loss(probes_NSLD):
            def layer(x_BLD, of):
                of_layer, index, probe_SLD = of
                found = []
                for sublayer, probe_LD in zip(both, probe_SLD):
                    h_BLD = column_input(sublayer.norm(x_BLD, of_layer[sublayer.norm_name]), par, {}, sublayer.in_site)
                    core_BLF = sublayer.core(h_BLD, of_layer[sublayer.name], context(index))
                    y_BLD = row_partial(core_BLF, of_layer[sublayer.name][sublayer.out_name]["kernel"], par)
                    sum_BLD = reduce_partials(y_BLD, par, {}, sublayer.out_site)
                    terms_LD = lax.psum(jnp.square(y_BLD[0]), par.axis)
                    found.append((terms_LD, sum_BLD[0], y_BLD[0, at]))
                    x_BLD += sublayer.branch(sum_BLD + probe_LD[None], sublayer.branch_params(of_layer))
                return x_BLD, tuple(jnp.stack(values) for values in zip(*found))

            x_BLD = decoder.embed(used, inputs_BL, config, par, {})
            x_BLD, found = lax.scan(layer, x_BLD, (used["layers"], jnp.arange(config.n_layers), probes_NSLD))
            x_BLD = norm(x_BLD, used["final_norm"], config)
            ones = jnp.ones(targets_BL.shape)
            nll, _ = decoder.head_loss(used, x_BLD, targets_BL, ones, config=config, par=par, state={})
            return nll, found

        used = decoder.use_replicated_params(params, config, par)
        probes = jnp.zeros((config.n_layers, 2, length, D))
        gradients, (terms, sums, own) = jax.grad(loss, has_aux=True)(probes)
        flat = lambda a: a.reshape(-1, *a.shape[2:])
        g_SLD, terms_SLD, sums_SLD, own_SND = flat(gradients), flat(terms), flat(sums), flat(own)
        fed_SLD = g_SLD - jnp.concatenate([g_SLD[1:], g_SLD[-1:]])
        squares_SLD = terms_SLD + jnp.square(sums_SLD)
        pairs = [jnp.einsum("slc,sld->cd", _capped(jnp.square(g), squares_SLD), squares_SLD, precision="highest")
                 for g in (g_SLD, fed_SLD)]  # fmt: skip
        means = [jnp.sum(a, 1) for a in (terms_SLD, jnp.square(sums_SLD), jnp.square(g_SLD))]
        return (*means, *pairs), own_SND[:, :, None], (sums_SLD[:, at], g_SLD[:, at], fed_SLD[:, at])

    specs = (P(), P(None, None, "tp"), P())
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(param_specs(config, tp), P(), P()), out_specs=specs))
    means, kept = 0, []
    for tokens_L in tokens_WL:
        found, own, (sums, *slopes) = jax.device_get(program(params, tokens_L[None, :-1], tokens_L[None, 1:]))
        means = [a + b.astype(np.float64) for a, b in zip(means or [0.0] * 5, found)]
        kept.append((np.concatenate([own, sums[:, :, None]], 2), *slopes))
    means = [a / (length * len(tokens_WL)) for a in means]
    return Sites(*means, *(np.concatenate(parts, 1) for parts in zip(*kept)))
