"""Tensor parallelism inside a manual region: Megatron's conjugate pairs and the dense layers built on them.

The functions are documented in `taco_jax/nn/tensor_parallel.py`.
"""

from taco_jax.nn.tensor_parallel import (
    REMAT_NAMES,
    check_region,
    column_dense,
    column_product,
    copy_to_tp,
    copy_with_feedback,
    gather_from_sp,
    in_manual_region,
    loses,
    reduce_from_tp,
    reduce_with_feedback,
    row_dense,
    row_product,
    scatter_to_sp,
    start_sum,
    start_sum_with_feedback,
    to_varying,
)

__all__ = [
    "REMAT_NAMES",
    "check_region",
    "column_dense",
    "column_product",
    "copy_to_tp",
    "copy_with_feedback",
    "gather_from_sp",
    "in_manual_region",
    "loses",
    "reduce_from_tp",
    "reduce_with_feedback",
    "row_dense",
    "row_product",
    "scatter_to_sp",
    "start_sum",
    "start_sum_with_feedback",
    "to_varying",
]
