"""The codecs that the record recommends, by use: what `auto` takes.

experiments/fit_forecast.py writes `recommended.json` by the rule of `taco_jax.forecast.recommend`; docs/codecs.md has
it as a table. Where the use is not known, as in a collective by itself, it is training.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from taco_jax.codec import AUTO

FILE = "recommended.json"
TRAINING, FIRST_TOKEN, STAGES, GRADIENTS, WEIGHTS = "training", "first_token", "stages", "gradients", "weights"
FEEDBACK = "first_token_feedback"
"""The first token where each sum takes along what the one before it lost."""


@functools.cache
def load() -> dict[str, dict[str, Any]]:
    """Returns {use: {"forward", "backward": codecs, and the row of the record that they are from}}."""
    return json.loads(resources.files(__package__).joinpath(FILE).read_text())


def recommended(use: str) -> tuple[str, str]:
    """Returns the codecs (forward, backward) of a use."""
    row = load()[use]
    return row["forward"], row["backward"]


def resolved(codec: Any, use: str, direction: str) -> Any:
    """Returns `codec`, and the recommended one of a direction, forward or backward, in the place of `auto`."""
    return load()[use][direction] if isinstance(codec, str) and codec == AUTO else codec
