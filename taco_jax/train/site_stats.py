"""Measures of a step's sites: put together over devices, and as the numbers that records have.

Measures of a site are float32[(layers,) 2, K]: forward and backward, and the slot's width K, which is 1 (the largest
block scale alone) or len(codec.STATS).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from taco_jax.codec import STATS
from taco_jax.collectives import comm_log
from taco_jax.mesh import AXES


def over_devices(measures: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Local measures -> over all devices: one maximum (and one sum of the statistics) serves all sites."""
    if not measures:
        return {}
    names, leaves = list(measures), [measures[s].reshape(-1, measures[s].shape[-1]) for s in measures]
    flat = jnp.concatenate(leaves)
    comm_log.exact("scales/amax", "backward", "pmax", AXES, flat[:, 0])
    # A reduction may drop a NaN from a maximum, never an infinity; `update_scale_state` skips both.
    columns = [lax.pmax(jnp.where(jnp.isnan(flat[:, :1]), jnp.inf, flat[:, :1]), AXES)]
    if flat.shape[-1] > 1:
        comm_log.exact("scales/stats", "backward", "psum", AXES, flat[:, 1:])
        columns.append(lax.psum(flat[:, 1:], AXES))
    flat = jnp.concatenate(columns, axis=-1)
    ends = np.cumsum([len(leaf) for leaf in leaves])[:-1]
    return {s: part.reshape(measures[s].shape) for s, part in zip(names, jnp.split(flat, ends), strict=True)}


def summarise_stats(stats: dict[str, Any]) -> dict[str, dict[str, float]]:
    """`metrics["stats"]` of one step -> site/direction -> {"snr_db", "clipped", "flushed"}, over all layers.

    Clipped and flushed are shares of all elements. Sites and directions that sent nothing compressed are left out.
    """
    out = {}
    for site, measures in stats.items():
        sums = np.asarray(measures, np.float64).reshape(-1, 2, len(STATS)).sum(0)
        for direction, row in zip(("forward", "backward"), sums, strict=True):
            values = dict(zip(STATS, row, strict=True))
            if not values["count"]:
                continue
            with np.errstate(invalid="ignore"):  # of a step that is not finite
                ratio = values["signal"] / values["noise"] if values["noise"] else np.inf
            out[f"{site}/{direction}"] = {
                "snr_db": float(10 * np.log10(ratio)) if ratio > 0 else float("nan"),
                "clipped": float(values["clipped"] / values["count"]),
                "flushed": float(values["flushed"] / values["count"]),
            }
    return out
