"""The record of a step: its time from end to end, what it sent, its share of the devices' peak, and their memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import jax

from taco_jax.config import TrainConfig
from taco_jax.train.metrics import bf16_peak, flops_per_token, peak_memory

if TYPE_CHECKING:
    from taco_jax.collectives.comm_log import Table
    from taco_jax.train.step import Program

SENT = ("bytes", "bytes_bf16")
"""Keys of a record's messages: as they are sent, and in bf16."""


class StepRecords:
    """Times steps, and makes the records that `taco_jax.train.metrics` describes.

    sent: a record's keys of messages. seconds_per_step: of the recent steps; None before the first.
    """

    def __init__(self, config: TrainConfig, program: Program):
        peak = bf16_peak(jax.local_devices()[0].device_kind)
        self._peak_flops = peak and peak * config.mesh.size
        self._flops_per_token = flops_per_token(config.model, config.data.sequence_length, program.adapters)
        self.sent: dict[str, Any] = {}
        self.seconds_per_step: float | None = None
        self._clock: float | None = None
        self._timed_step = 0

    @property
    def running(self) -> bool:
        """Returns whether the clock was started."""
        return self._clock is not None

    def count(self, table: Table) -> None:
        """Takes the messages of the program that is in force."""
        sent, bf16 = table.total("activation")
        axes = table.by_axis().items()
        total = lambda rows: {key: sum(getattr(row, key) for row in rows) for key in SENT}
        self.sent = {"comm_bytes": sent, "comm_bytes_bf16": bf16, "comm": {axis: total(rows) for axis, rows in axes}}

    def restart(self, step: int) -> float:
        """The next step begins now, after `step`. Returns the time."""
        self._clock, self._timed_step = time.perf_counter(), step
        return self._clock

    def record(self, config: TrainConfig, step: int, values: dict[str, Any], *, samples: int, now: float) -> dict:
        """Returns the record of `step`, which ended at `now`.

        values: its metrics. samples: taken from the data by then.
        """
        seconds = (now - self._clock) / (step - self._timed_step)
        self._clock, self._timed_step = now, step
        # The remaining time follows the recent steps.
        old = self.seconds_per_step
        self.seconds_per_step = seconds if old is None else 0.7 * old + 0.3 * seconds
        tokens = config.global_batch * config.data.sequence_length / seconds
        used = peak_memory(jax.local_devices())
        record = {"step": step} | {key: float(value) for key, value in values.items() if key != "stats"}
        record["skipped"] = int(record["skipped"])
        record |= {
            "tokens_per_second": tokens,
            "step_seconds": seconds,
            **self.sent,
            "mfu": self._peak_flops and tokens * self._flops_per_token / self._peak_flops,
            "peak_memory_bytes": used,
            "samples": samples,
        }
        if "stats" in values:
            from taco_jax.train.site_stats import summarise_stats

            record["sites"] = summarise_stats(values["stats"])
        return record
