"""What the training step asks of a pipeline: the loss of a batch under any schedule, and what goes with it."""

from __future__ import annotations

from taco_jax.pipeline.circular import loss
from taco_jax.pipeline.evaluation import evaluate
from taco_jax.pipeline.one_f1b import value_and_grad
from taco_jax.pipeline.send import AXIS, SITE, plan
from taco_jax.pipeline.stages import sum_over_stages

__all__ = ["AXIS", "SITE", "evaluate", "loss", "plan", "sum_over_stages", "value_and_grad"]
