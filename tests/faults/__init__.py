"""The seeded faults that `tests/mutants.py` applies: one table for each part of the project."""

from faults import (
    calibration,
    codec,
    collectives,
    data,
    dropin,
    forecast,
    inference,
    kernels,
    models,
    pipeline,
    runs,
    training,
)
from faults.mutant import Mutant

KINDS = {
    "codec": codec.MUTANTS,
    "collectives": (*collectives.MUTANTS, *dropin.MUTANTS),
    "models": models.MUTANTS,
    "training": (
        *training.MUTANTS,
        *pipeline.MUTANTS,
        *data.MUTANTS,
        *runs.MUTANTS,
        *forecast.MUTANTS,
        *calibration.MUTANTS,
    ),
    "inference": inference.MUTANTS,
    "kernels": kernels.MUTANTS,
}
MUTANTS = tuple(mutant for mutants in KINDS.values() for mutant in mutants)

__all__ = ["KINDS", "MUTANTS", "Mutant"]
