"""The rule by which codecs are recommended from the record, use by use.

1. A row of the record counts if it has a standard error (one pair of runs is no proof), if it is of presets, and if
   its change plus one standard error lies within `record.bound()`.
2. Of those, the fewest bytes win. Bytes that differ by at most 2 % are alike, and of them the smallest change wins.
3. Where no row counts, messages go exactly.

experiments/fit_forecast.py writes what comes out to `taco_jax/compression/recommended.json`, which `auto` takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taco_jax.codec import CODECS
from taco_jax.compression import recommended
from taco_jax.compression.compression import codec_pair
from taco_jax.forecast.record import FEEDBACK, Loss

ALIKE_BYTES = 1.02
WIDTH = 4096
USES = {
    recommended.TRAINING: ("training", False),
    recommended.FIRST_TOKEN: ("first_token", False),
    recommended.FEEDBACK: ("first_token", True),
    recommended.STAGES: ("stages", False),
    recommended.GRADIENTS: ("gradients", False),
    recommended.WEIGHTS: ("weights", False),
}
"""Use: the part of the record that it goes by, and whether by its rows with error feedback."""


def within(loss: Loss, bound: float) -> bool:
    """Returns whether a row of the record counts: its change with one standard error is within the bound."""
    return loss.error is not None and loss.change + loss.error <= bound


def bits(codecs: str) -> float:
    """Bits of an element in the codecs FORWARD[:BACKWARD], the mean of both; of tokens of `WIDTH` values."""
    return sum(CODECS[codec].of((WIDTH,)).bits for codec in codec_pair(codecs)) / 2


def choose(rows: Mapping[str, Loss], bound: float) -> str | None:
    """Returns the codecs FORWARD[:BACKWARD] of the rows that the rule recommends; None: exact."""
    counted = {c: loss for c, loss in rows.items() if set(c.split(":")) <= set(CODECS) and within(loss, bound)}
    if not counted:
        return None
    fewest = min(map(bits, counted))
    alike = [codecs for codecs in counted if bits(codecs) <= ALIKE_BYTES * fewest]
    return min(alike, key=lambda codecs: counted[codecs].change)


def of_record(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the content of `recommended.json`: each use with its codecs, the bits of an element, and the row that
    speaks for them, None for exact."""
    out = {}
    for use, (part, fed) in USES.items():
        rows = {
            codecs.removesuffix(FEEDBACK): Loss(**row)
            for codecs, row in record[part].items()
            if codecs.endswith(FEEDBACK) == fed
        }
        codecs = choose(rows, record["bound"])
        forward, backward = codec_pair(codecs or "none")
        row = None if codecs is None else record[part][codecs + FEEDBACK * fed]
        out[use] = {"forward": forward, "backward": backward, "bits": bits(codecs or "none"), "record": row}
    return out
