"""Lines between warpgroups and their clerks: one end says that all is done for a tile, the other waits for it.

Every tile is told once. Barriers have phases of which no waiter may miss one, so an end can be `RING` tiles ahead.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

RING = 2


def scratch(line: str, tellers: int = 1) -> dict:
    """The barriers of a line; `tellers` tell together."""
    told = plgpu.Barrier(num_arrivals=tellers, num_barriers=RING)
    return {line: told, f"{line}_taken": plgpu.Barrier(num_barriers=RING)}


def tell(s: dict, line: str, t) -> None:
    """That all is done for tile t, on one of the lines between a warpgroup and another one or a clerk."""
    place = lax.rem(t, jnp.int32(RING))
    pl.when(t >= RING)(lambda: plgpu.barrier_wait(s[f"{line}_taken"].at[place]))
    plgpu.barrier_arrive(s[line].at[place])


def hear(s: dict, line: str, t) -> None:
    """Waits until it is told."""
    place = lax.rem(t, jnp.int32(RING))
    plgpu.barrier_wait(s[line].at[place])
    plgpu.barrier_arrive(s[f"{line}_taken"].at[place])
