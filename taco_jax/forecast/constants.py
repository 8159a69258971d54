"""Constants fitted on sums and kernels alone: `constants.json`, which experiments/fit_forecast.py writes from
experiments/results. No step and no time to a first token went into it.

Times are microseconds, rates 1e9 bytes a second. docs/forecast.md has the equations that they are constants of.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

FILE, ERRORS = "constants.json", "errors.json"


@functools.cache
def load(file: str = FILE) -> dict[str, Any]:
    """The content of a JSON file of this package."""
    return json.loads(resources.files(__package__).joinpath(file).read_text())
