"""Compressed collectives: one uint8 buffer a hop crosses the link, sums are float32 in rank order on every rank."""

from taco_jax.collectives.api import (
    all_gather,
    all_to_all,
    copy,
    ppermute,
    psum,
    psum_scatter,
    start_psum,
    start_psum_scatter,
)
from taco_jax.collectives.error_feedback import (
    copy_with_feedback,
    loses,
    psum_with_feedback,
    start_psum_with_feedback,
)
from taco_jax.collectives.manual_region import check_region, in_manual_region, to_varying
from taco_jax.collectives.vjp import REMAT_NAMES

__all__ = [
    "REMAT_NAMES", "all_gather", "all_to_all", "check_region", "copy", "copy_with_feedback", "in_manual_region",
    "loses", "ppermute", "psum", "psum_scatter", "psum_with_feedback", "start_psum", "start_psum_scatter",
    "start_psum_with_feedback", "to_varying",
]  # fmt: skip
