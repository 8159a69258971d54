"""Compressed collectives in programs that exist, without a changed line: a compiler hook replaces them.

    with taco_jax.compressed({"tensor": "int8h"}) as report:
        state, metrics = train_step(state, batch)
    print(report)

`docs/drop-in.md` says how a plan is written and what stays exact.
"""

from taco_jax.dropin.calibrate import Calibration, calibrated
from taco_jax.dropin.compat import MissingHookError
from taco_jax.dropin.hook import Installed, compressed, install
from taco_jax.dropin.report import DropInError, Report, Site

__all__ = [
    "Calibration", "DropInError", "Installed", "MissingHookError", "Report", "Site", "calibrated", "compressed",
    "install",
]  # fmt: skip
