"""Pipeline parallelism: the layers in stages over the mesh axis pp, and microbatches that follow each other.

Everything runs inside the same full-manual shard_map as the rest of the step, which finds here what it asks for: the
loss of a batch under any schedule, and what goes with it.
"""

from taco_jax.config.schedule import SCHEDULES, Schedule
from taco_jax.pipeline import circular, one_f1b
from taco_jax.pipeline.circular import evaluate
from taco_jax.pipeline.send import AXIS, SITE, plan
from taco_jax.pipeline.stages import sum_over_stages

__all__ = [
    "AXIS",
    "SCHEDULES",
    "SITE",
    "Schedule",
    "evaluate",
    "plan",
    "sum_over_stages",
    "value_and_grad",
]


def value_and_grad(*arguments, base=None):
    """`circular.value_and_grad`, or `one_f1b.value_and_grad`, as the last of the arguments, the schedule, says."""
    module = one_f1b if arguments[-1].kind == "1f1b" else circular
    return module.value_and_grad(*arguments, base=base)
