"""Faults of pipeline parallelism."""

from faults.mutant import Mutant

MUTANTS = (
    Mutant(
        "stage-order",
        "stages send to the stage before them",
        "taco_jax/pipeline/send.py",
        "return tuple((stage, (stage + 1) % stages) for",
        "return tuple(((stage + 1) % stages, stage) for",
        ("tests/pipeline/test_pipeline.py -k 'gradients_equal and gpipe'",),
    ),
    Mutant(
        "microbatch-lost",
        "1F1B leaves out the backward pass of the last microbatch",
        "taco_jax/pipeline/one_f1b.py",
        "        m = t - 2 * (schedule.stages - 1) + stage\n        live = (m >= 0) & (m < schedule.microbatches)",
        "        m = t - 2 * (schedule.stages - 1) + stage\n        live = (m >= 0) & (m < schedule.microbatches - 1)",
        ("tests/pipeline/test_pipeline.py -k 'gradients_equal and 1f1b'",),
    ),
    Mutant(
        "residuals-of-rounds",
        "a stage keeps the residuals of its last microbatch for all",
        "taco_jax/pipeline/circular.py",
        "place = jnp.where(live, item, schedule.items)",
        "place = jnp.where(live, 0, schedule.items)",
        ("tests/pipeline/test_pipeline.py -k 'gradients_equal and gpipe'",),
    ),
    Mutant(
        "shares-of-the-head",
        "every stage takes the loss of the same sequences' targets",
        "taco_jax/pipeline/stages.py",
        "return lax.dynamic_slice_in_dim(a_B, lax.axis_index(AXIS) * size, size)",
        "return lax.dynamic_slice_in_dim(a_B, 0 * lax.axis_index(AXIS), size)",
        ("tests/pipeline/test_shared_head.py -k gradients_equal",),
    ),
    Mutant(
        "what-moves",
        "what depends on a layer's input and its weights counts as the same in all rounds",
        "taco_jax/pipeline/residuals.py",
        "kind = max(kinds, default=_NOTHING)",
        "kind = min(kinds - {_NOTHING}, default=_NOTHING)",
        ("tests/pipeline/test_residuals.py",),
    ),
    Mutant(
        "circular-items",
        "chunks of the circular schedule come in the wrong order",
        "taco_jax/config/schedule.py",
        "microbatch, chunk = group * self.stages + rest % self.stages, rest // self.stages",
        "microbatch, chunk = group * self.stages + rest // self.chunks, rest % self.chunks",
        ("tests/pipeline/test_pipeline_schedule.py",),
    ),
    Mutant(
        "empty-ticks",
        "empty ticks of a pipeline are measured",
        "taco_jax/pipeline/send.py",
        "return scales._replace(slot=jnp.where(live, scales.slot, 0))",
        "return scales",
        ("tests/pipeline/test_pipeline.py -k test_compressed",),
    ),
)
