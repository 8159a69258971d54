"""The messages that the NVLink kernels support. Importable, and answered, without a GPU."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import compute_capability, describe
from pallas_kernels.formats import Format
from pallas_kernels.mosaic import tiling as mosaic
from pallas_kernels.nvlink import hardware

OPERATIONS = ("all_gather", "all_reduce", "reduce_scatter")
RANKS = (2, 4, 8)


def why_device_unsupported(device) -> str | None:
    """Returns why no NVLink kernel runs on `device`, whatever the link is (`hardware.missing`); None where they do."""
    if device.platform not in ("gpu", "cuda"):
        return f"platform {device.platform!r} has no NVLink kernels"
    if compute_capability(device) is None or compute_capability(device)[0] != 9:
        return f"NVLink kernels need compute capability 9.0, not {describe(device)}"
    if jax.process_count() > 1:
        return "several processes drive these GPUs, and peer memory is for one that drives all"
    if (reason := hardware.unfit_memory()) is not None:
        return reason
    return _too_old()


def why_unsupported(fmt: Format, operation: str, dtype: str, ranks: int, per_message: int | None = None) -> str | None:
    """Returns why `operation` cannot run over `ranks` GPUs, None where it can.

    per_message: elements of one rank's message (all_reduce: of its share, or with two ranks of x).
    """
    if operation not in OPERATIONS:
        return f"there is no NVLink kernel for {operation}, only for {', '.join(OPERATIONS)}"
    if (reason := _too_old()) is not None:
        return reason
    if ranks not in RANKS:
        return f"nvlink kernels are for {', '.join(map(str, RANKS))} ranks, not {ranks}"
    for name in ("encode", "decode"):
        if (reason := mosaic.why_unsupported(fmt, name, dtype)) is not None:
            return reason
    if fmt.scale == "site":
        return "nvlink kernels have no scale 'site'"
    if fmt.rounding == "stochastic":
        return "nvlink kernels round to nearest"
    row = max(128, fmt.block)
    if per_message is not None and (per_message % (8 * row) or per_message < mosaic.TILE_ROWS * row):
        least = mosaic.TILE_ROWS * row
        return f"a message of {per_message} elements is not whole groups of 8 rows of {row}, or under {least}"
    if not _fits(fmt, operation, dtype, ranks):
        return f"{operation} of blocks of {fmt.block} of {dtype} over {ranks} ranks needs too much shared memory"
    return None


def _too_old() -> str | None:
    from pallas_kernels import compat  # imports Mosaic

    if compat.WARPS_KNOW_THE_MESH:
        return None
    return f"NVLink kernels need jax 0.11 or newer, and this is {jax.__version__}"


def _fits(fmt: Format, operation: str, dtype: str, ranks: int) -> bool:
    from pallas_kernels.nvlink import operations

    return operations.fits(fmt, operation, dtype, ranks)


__all__ = ["OPERATIONS", "RANKS", "why_device_unsupported", "why_unsupported"]
