"""Pipeline parallelism: the layers in stages over the mesh axis pp, and microbatches that follow each other.

Everything runs inside the same full-manual shard_map as the rest of the step, which finds here what it asks for: the
loss of a batch under any schedule, and what goes with it.
"""

from taco_jax.config.schedule import SCHEDULES, Schedule
from taco_jax.pipeline.circular import evaluate, loss
from taco_jax.pipeline.one_f1b import value_and_grad
from taco_jax.pipeline.send import AXIS, SITE, plan
from taco_jax.pipeline.stages import sum_over_stages

__all__ = [
    "AXIS",
    "SCHEDULES",
    "SITE",
    "Schedule",
    "evaluate",
    "loss",
    "plan",
    "sum_over_stages",
    "value_and_grad",
]
