"""Pipeline parallelism: the layers in stages over the mesh axis pp, and microbatches that follow each other.

Everything runs inside the same full-manual shard_map as the rest of the step.
"""

from taco_jax.config.schedule import SCHEDULES, Schedule

__all__ = ["SCHEDULES", "Schedule"]
