"""The effect of a codec on a model's loss on a text, and on each sum that it writes.

    windows of `context` tokens that do not overlap, each token predicted from those before it in its window
    loss = mean negative log-likelihood (nats);   perplexity = exp(loss)
    SNR of a site = 10 log10(sum |y|^2 / sum |y' - y|^2),   y the exact sum over the ranks, y' the compressed one, both
                    of what the compressed model has come to there (with error feedback: errors fed back included)

With error feedback every position has what the last sum lost added, as the last position of a prompt has when text is
generated: there that is one exact message of one position, here of all, which `sent` does not count.

Dims: N layers, B windows, L context, D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.collectives import comm_log
from taco_jax.inference.forward import contexts_by_layer, scan_layers, stream_of
from taco_jax.inference.settings import ROWS, Layout, Settings
from taco_jax.models import decoder
from taco_jax.models.attention import causal
from taco_jax.models.blocks import norm
from taco_jax.models.config import ModelConfig
from taco_jax.models.params import param_specs
from taco_jax.models.projections import (
    ResidualStream,
    column_input,
    finish_stream,
    reduce_partials,
    reduce_partials_with_feedback,
    row_partial,
)


@dataclasses.dataclass(frozen=True)
class Score:
    """One codec on one text.

    nll: nats of every predicted token. best: the id that the model holds most likely there. power: site ->
    float64[N, 2], sums of |y|^2 and |y' - y|^2 of each layer, zeros where it sends exactly. bits: site -> wire bits per
    element, all layers together. sent, bf16: bytes that a device sends for a window at these sites, and would in bf16.
    """

    nll: np.ndarray
    best: np.ndarray
    power: Mapping[str, np.ndarray]
    bits: Mapping[str, float]
    sent: float
    bf16: float

    @property
    def loss(self) -> float:
        return float(self.nll.mean(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))

    def against(self, exact: Score) -> dict[str, float]:
        """Paired with the exact model token by token: change of the perplexity (a fraction), its standard error, and
        the share of tokens where both hold the same id most likely."""
        difference = self.nll.astype(np.float64) - exact.nll
        return {
            "change": float(np.expm1(difference.mean())),
            "error": float(difference.std() / np.sqrt(difference.size)),
            "agreement": float(np.mean(self.best == exact.best)),
        }

    def snr_db(self, site: str, layer: int | None = None) -> float | None:
        """Over all layers, or of one; None where it sends exactly."""
        signal, noise = self.power[site].sum(0) if layer is None else self.power[site][layer]
        return float(10 * np.log10(signal / noise)) if noise > 0 else None


def windows(ids: list[int], context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, targets int32[W, L], which are predictions bool[W, L]) of a text; the last window is filled with 0."""
    count = -(-(len(ids) - 1) // context)
    filled = np.zeros(count * context + 1, np.int32)
    filled[: len(ids)] = ids
    real = np.arange(count * context) < len(ids) - 1
    return filled[:-1].reshape(-1, context), filled[1:].reshape(-1, context), real.reshape(-1, context)


class Evaluation:
    """A model on its mesh, and windows of a text; `score(settings)` runs all of them with one setting."""

    def __init__(self, config: ModelConfig, mesh: Mesh, params: Any, ids: list[int], context: int):
        self.config, self.mesh, self.params = config, mesh, params
        self.tokens, self.targets, self.real = windows(ids, context)

    def score(self, settings: Settings) -> Score:
        config, mesh = self.config, self.mesh
        layout = settings.layout(config, mesh.devices.flat[0], decoding=False)
        mapped = jax.shard_map(
            lambda params, tokens_BL, targets_BL: measured(params, tokens_BL, targets_BL, config, layout),
            mesh=mesh, in_specs=(param_specs(config, settings.tp), P(), P()), out_specs=P(),
        )  # fmt: skip
        program, everywhere = jax.jit(mapped), NamedSharding(mesh, P())
        nll, best, power = [], [], {}
        with comm_log.record() as table:
            for tokens_L, targets_L, real_L in zip(self.tokens, self.targets, self.real):
                batch = jax.device_put((tokens_L[None], targets_L[None]), everywhere)
                nll_BL, best_BL, of_sites = jax.device_get(program(self.params, *batch))
                nll.append(nll_BL[0][real_L])
                best.append(best_BL[0][real_L])
                for site, sums_N2 in of_sites.items():
                    power[site] = power.get(site, 0.0) + sums_N2.astype(np.float64)
        rows = {site: [r for r in table.rows() if r.site.endswith(site)] for site in ROWS}
        sent = {site: (sum(r.bytes for r in of), sum(r.bytes_bf16 for r in of)) for site, of in rows.items()}
        bits = {f"layers/{site}": 16 * sent[site][0] / sent[site][1] for site in ROWS if sent[site][1]}
        total = [sum(values) for values in zip(*sent.values())]
        return Score(np.concatenate(nll), np.concatenate(best), power, bits, *total)


def measured(params, tokens_BL: jax.Array, targets_BL: jax.Array, config: ModelConfig, layout: Layout):
    """(nll float32[B, L], best int32[B, L], {site: float32[N, 2]}), inside the shard_map: see `measured_stream`."""
    x_BLD, power = measured_stream(params, tokens_BL, config, layout)
    return *decoder.head_score(params, x_BLD, targets_BL, config, layout.par), power


def measured_stream(params, tokens_BL: jax.Array, config: ModelConfig, layout: Layout):
    """(the final normalisation's output x_BLD, {site: float32[N, 2]}), inside the shard_map: the decoder's layers, with
    the exact sum beside every compressed one (zeros where there is none)."""
    par, scales = layout.par, layout.scales()
    params = decoder.use_replicated_params(params, config, par)
    context = contexts_by_layer(config, jnp.arange(tokens_BL.shape[1]))

    def layer(stream, index, of_layer, sites_of):
        (x_BLD, error_BLD, _), power = stream, {}
        for sublayer, site in zip(decoder.sublayers(config, par, causal(config, par), sites_of), ROWS):
            out = of_layer[sublayer.name][sublayer.out_name]
            h_BLD = column_input(sublayer.norm(x_BLD, of_layer[sublayer.norm_name]), par, {}, sublayer.in_site)
            y_BLD = row_partial(sublayer.core(h_BLD, of_layer[sublayer.name], context(index)), out["kernel"], par)
            whole_BLD, compression = y_BLD.astype(jnp.float32), par.compression(sublayer.out_site)
            if error_BLD is None:
                sum_BLD = reduce_partials(y_BLD, par, scales, sublayer.out_site)
            else:
                if compression is not None and compression.error_feedback:
                    whole_BLD += error_BLD
                sum_BLD, error_BLD = reduce_partials_with_feedback(y_BLD, error_BLD, par, scales, sublayer.out_site)
            squares = jnp.zeros(()), jnp.zeros(())
            if compression is not None:
                exact_BLD = lax.psum(whole_BLD, par.axis)
                squares = jnp.square(exact_BLD), jnp.square(sum_BLD.astype(jnp.float32) - exact_BLD)
            power[f"layers/{site}"] = jnp.stack([jnp.sum(square) for square in squares])
            x_BLD += sublayer.branch(sum_BLD, sublayer.branch_params(of_layer))
        return ResidualStream(x_BLD, error_BLD), power

    x_BLD = decoder.embed(params, tokens_BL, config, par, {})
    stream, power = scan_layers(layer, stream_of(x_BLD, layout), params["layers"], layout)
    return norm(finish_stream(stream, par, "error"), params["final_norm"], config), power
