"""Results that `python -m taco_jax.tune` measured on a machine: from what size a codec pays, in how many chunks, by
which exchange, and in how many hops a sum is fastest. Read when a collective is traced.

    {"NVIDIA H100 80GB HBM3, 4 ranks, host memory": {"taco": {
        "min_bytes": 65536,
        "best": [{"bytes": 65536, "chunks": 1, "exchange": "all_to_all"}],
        "sums": [{"bytes": 65536, "chunks": 1, "algorithm": "one_shot"}]}}}

min_bytes: sums from this size on were faster compressed; null: none was. best: the fastest way of two hops at each
measured size; a message takes that of the next smaller one. sums: likewise, the algorithm that won for a sum and its
chunks. times: what was measured, by operation, in microseconds [median, spread]:

    "times": {"psum": [{"bytes": 65536, "free": [9.1, 0.1], "exact": [31.2, 0.2], "ways": [
        {"link": "nccl", "algorithm": "one_shot", "chunks": 1, "exchange": "all_to_all", "us": [28.0, 0.3]}]}]}

Where a file has the times of an operation, they alone decide (`timings.decide`). Files of earlier versions have no
times, or no sums either: then min_bytes, best and sums decide, for all operations. The file is
~/.cache/taco_jax/tuned.json, or the one that the environment variable TACO_JAX_TUNED names (an empty value: none). Any
other key, and a codec that is no preset, is an error: it would never be read. The CPU emulator reads only a file that
is named so: it compresses everything, so that what is trained there is what is asked for.

GPUs whose file says nothing of a codec go by `measured.json` beside this module: a file of the same form, measured on
the kinds of GPUs and links that it names; the records are in experiments/results/tune_*. With an empty variable they do
not.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pallas_kernels import nvlink
from pallas_kernels.dispatch import region_device
from pallas_kernels.nvlink import hardware
from taco_jax.codec import CODECS
from taco_jax.compression import timings
from taco_jax.compression.compression import EXCHANGES, LINKS, MAX_CHUNKS, SHOTS
from taco_jax.compression.timings import Row, Time, Way

MEASURED = Path(__file__).with_name("measured.json")
VARIABLE = "TACO_JAX_TUNED"
# Without a measurement: on GPUs small messages are bound by launch latency, where compressing only adds kernels.
DEFAULT_MIN_BYTES = 1 << 20
# Over NVLink a sum of 2 MiB of bf16 in one kernel is 1.2 times as fast as NCCL's, but has kernels beside it that keep
# the scales; one of 8 MiB is 1.4 times as fast. In several kernels one of 32 MiB is as fast, one of 128 MiB 1.2 times.
NVLINK_MIN_BYTES, SEPARATE_MIN_BYTES = 4 << 20, 64 << 20
# Going in levels costs one or two hops more, some tens of microseconds, in which a link of 400 Gbit/s carries a MiB or
# two. An estimate: nothing has been measured on several hosts.
HIERARCHICAL_MIN_BYTES = 1 << 20
NEVER = 1 << 62


# The measurement keeps what it does not measure anew, so it reads the file as well.
REMEDY = "repair it, or delete the file and run python -m taco_jax.tune"


class TunedFileError(ValueError):
    """The file of tuned values cannot be read or written. One line: file, key, rule."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """One codec on one link. min_bytes: None if compressing never paid. best: (bytes, chunks, exchange), by size; sums:
    (bytes, chunks, algorithm), empty where only one algorithm was measured; times: rows by size of each operation."""

    min_bytes: int | None
    best: tuple[tuple[int, int, str], ...]
    sums: tuple[tuple[int, int, str], ...] = ()
    times: Mapping[str, tuple[Row, ...]] = dataclasses.field(default_factory=dict)

    def transport(self, nbytes: int) -> tuple[int, str]:
        """(chunks, exchange) for a message of `nbytes`."""
        return _of_size(self.best, nbytes)[1:]

    def winner(self, nbytes: int) -> tuple[int, int, str] | None:
        """(bytes it was measured at, chunks, algorithm) for a sum of `nbytes`; None if that was not measured."""
        return _of_size(self.sums, nbytes) if self.sums else None


def _of_size(rows, nbytes: int):
    """The row of the next smaller size, or of the smallest."""
    below = [row for row in rows if row[0] <= nbytes]
    return below[-1] if below else rows[0]


def describe_sums(sums: tuple[tuple[int, int, str], ...]) -> str:
    """Returns which algorithm wins from which size: "one_shot, two_shot from 1,048,576 bytes"."""
    turns = [row for before, row in zip((None, *sums), sums) if before is None or before[2] != row[2]]
    return ", ".join(row[2] + (f" from {row[0]:,} bytes" if i else "") for i, row in enumerate(turns))


def default_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taco_jax" / "tuned.json"


def path(platform: str) -> Path | None:
    """The file that devices of a platform read; None for none."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]) if os.environ[VARIABLE] else None
    return None if platform == "cpu" else default_path()


def link_label(environment: Mapping[str, str] = os.environ) -> str:
    """Returns how NCCL's messages move between the GPUs of a host, as far as its settings say."""
    disabled = lambda name: environment.get(name, "0") not in ("", "0")
    if not disabled("NCCL_P2P_DISABLE"):
        return "nvlink or pcie p2p"
    return "sockets" if disabled("NCCL_SHM_DISABLE") else "host memory"


def entry_name(device_kind: str, ranks: int) -> str:
    return f"{device_kind}, {ranks} ranks, {link_label()}"


def read(file: Path) -> dict[str, dict[str, Tuned]]:
    """{entry name: {codec: Tuned}}; {} where there is no file. Raises TunedFileError, naming the file and the key."""
    try:
        stamp = file.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TunedFileError(f"{file}: cannot be read ({error.strerror})") from error
    return _read(file, stamp)


@functools.lru_cache(maxsize=8)
def _read(file: Path, stamp: int) -> dict[str, dict[str, Tuned]]:
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise TunedFileError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise TunedFileError(f"{file}: is no JSON file ({reason}); {REMEDY}") from None
    return {
        name: {codec: _tuned(file, f"{name!r}: {codec}", value) for codec, value in _dict(file, name, codecs).items()}
        for name, codecs in _dict(file, "the file", content).items()
    }


def _dict(file, key, value) -> dict:
    if not isinstance(value, dict):
        _refuse(file, key, value, "must be an object")
    return value


def _tuned(file, key, value) -> Tuned:
    fields = _dict(file, key, value)
    name = key.rpartition(": ")[2]
    if name not in CODECS or CODECS[name].exact:
        _refuse(file, key, value, "must be a codec preset that compresses")
    unknown = sorted((fields.keys() ^ {"min_bytes", "best"}) - {"sums", "times"})
    if unknown:
        rule = "must have exactly the keys min_bytes and best, and may have sums and times"
        _refuse(file, f"{key}.{unknown[0]}", fields.get(unknown[0]), rule)
    least = fields["min_bytes"]
    if least is not None and not _is_count(least, 0):
        _refuse(file, f"{key}.min_bytes", least, "must be a number of bytes, or null for never")
    best = _rows(file, f"{key}.best", fields["best"], "exchange", EXCHANGES[1:])
    sums = _rows(file, f"{key}.sums", fields["sums"], "algorithm", SHOTS) if "sums" in fields else ()
    times = _dict(file, f"{key}.times", fields.get("times", {}))
    for operation in times.keys() - set(timings.OPERATIONS):
        rule = f"must be one of {', '.join(timings.OPERATIONS)}"
        _refuse(file, f"{key}.times.{operation}", times[operation], rule)
    return Tuned(least, best, sums, {name: _times(file, f"{key}.times.{name}", rows) for name, rows in times.items()})


def _times(file, key: str, listed) -> tuple[Row, ...]:
    """The rows of one operation, by size."""
    if not isinstance(listed, list) or not listed:
        _refuse(file, key, listed, "must be a list with an entry for each measured size")
    rows = []
    for i, row in enumerate(listed):
        at, row = f"{key}[{i}]", _exactly(file, f"{key}[{i}]", row, ("bytes", "free", "exact", "ways"))
        if not _is_count(row["bytes"], 0):
            _refuse(file, f"{at}.bytes", row["bytes"], "must be a number of bytes")
        if not isinstance(row["ways"], list) or not row["ways"]:
            _refuse(file, f"{at}.ways", row["ways"], "must be a list with an entry for each measured way")
        free, exact = (_time(file, f"{at}.{name}", row[name]) for name in ("free", "exact"))
        ways = dict(_way(file, f"{at}.ways[{j}]", way) for j, way in enumerate(row["ways"]))
        if len(ways) < len(row["ways"]):
            _refuse(file, f"{at}.ways", row["ways"], "must have each way once")
        rows.append(Row(row["bytes"], free, exact, ways))
    if len({row.bytes for row in rows}) < len(rows):
        _refuse(file, key, listed, "must have each size once")
    return tuple(sorted(rows, key=lambda row: row.bytes))


def _way(file, key: str, value) -> tuple[Way, Time]:
    fields = _exactly(file, key, value, (*Way._fields, "us"))
    choices = {"link": LINKS[1:], "algorithm": ("auto", *SHOTS), "exchange": EXCHANGES[1:]}
    for field, valid in choices.items():
        if fields[field] not in valid:
            _refuse(file, f"{key}.{field}", fields[field], f"must be {' or '.join(valid)}")
    if not _is_count(fields["chunks"], 1, MAX_CHUNKS):
        _refuse(file, f"{key}.chunks", fields["chunks"], f"must be a number from 1 to {MAX_CHUNKS}")
    return Way(**{field: fields[field] for field in Way._fields}), _time(file, f"{key}.us", fields["us"])


def _time(file, key: str, value) -> Time:
    good = isinstance(value, list) and len(value) == 2
    if not good or any(isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < NEVER for v in value):
        _refuse(file, key, value, "must be [median, spread] in microseconds")
    return Time(*map(float, value))


def _exactly(file, key: str, value, names: Sequence[str]) -> dict:
    """An object with these keys and no others."""
    fields = _dict(file, key, value)
    for name in sorted(fields.keys() ^ set(names)):
        _refuse(file, f"{key}.{name}", fields.get(name), f"must have exactly the keys {', '.join(names)}")
    return fields


def _rows(file, key: str, listed, choice: str, valid: tuple[str, ...]) -> tuple[tuple[int, int, str], ...]:
    """[{"bytes": ..., "chunks": ..., choice: one of valid}, ...] by size."""
    if not isinstance(listed, list) or not listed:
        _refuse(file, key, listed, "must be a list with an entry for each measured size")
    rows = []
    for i, row in enumerate(listed):
        row = _dict(file, f"{key}[{i}]", row)
        unknown = sorted(row.keys() - {"bytes", "chunks", choice})
        if unknown:
            rule = f"must have exactly the keys bytes, chunks and {choice}"
            _refuse(file, f"{key}[{i}].{unknown[0]}", row[unknown[0]], rule)
        for field, good, rule in (
            ("bytes", _is_count(row.get("bytes"), 0), "must be a number of bytes"),
            ("chunks", _is_count(row.get("chunks"), 1, MAX_CHUNKS), f"must be a number from 1 to {MAX_CHUNKS}"),
            (choice, row.get(choice) in valid, f"must be {' or '.join(valid)}"),
        ):
            if not good:
                _refuse(file, f"{key}[{i}].{field}", row.get(field), rule)
        rows.append((row["bytes"], row["chunks"], row[choice]))
    return tuple(sorted(rows))


def _is_count(value, least: int, most: int = NEVER) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _refuse(file, key, value, rule: str):
    raise TunedFileError(f"{file}: {key}={json.dumps(value)[:60]}: {rule}; {REMEDY}")


def check_writable(file: Path) -> None:
    """Makes the file's folder; raises TunedFileError where `write` could not write into it. Changes nothing else."""
    if file.is_dir():
        raise TunedFileError(f"{file}: is a folder; name a file in it, for example {file / 'tuned.json'}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise TunedFileError(
            f"{file}: cannot be written ({error.strerror}); name a file in a folder that can be made and written to"
        ) from None


def write(file: Path, entry: str, codecs: Mapping[str, Tuned]) -> None:
    """Puts one entry into the file; other entries, and this one's other codecs, stay."""
    check_writable(file)
    content = read(file)
    content = content | {entry: content.get(entry, {}) | dict(codecs)}
    plain = {
        name: {
            codec: {
                "min_bytes": tuned.min_bytes,
                "best": [dict(zip(("bytes", "chunks", "exchange"), row)) for row in tuned.best],
            }
            | ({"sums": [dict(zip(("bytes", "chunks", "algorithm"), row)) for row in tuned.sums]} if tuned.sums else {})
            | ({"times": {name: list(map(_plain, rows)) for name, rows in tuned.times.items()}} if tuned.times else {})
            for codec, tuned in by_codec.items()
        }
        for name, by_codec in content.items()
    }
    # A reader sees the old file or the new one, never half of one.
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(plain, indent=1) + "\n")
    new.replace(file)


def _plain(row: Row) -> dict:
    """A row as the file has it."""
    rounded = lambda time: [round(value, 2) for value in time]
    ways = [way._asdict() | {"us": rounded(time)} for way, time in row.ways.items()]
    return {"bytes": row.bytes, "free": rounded(row.free), "exact": rounded(row.exact), "ways": ways}


def find(codec_name: str, ranks: int, device=None) -> Tuned | None:
    """Returns what was measured for a codec, by default on the device that is traced for; None if nothing was."""
    found = _found(codec_name, ranks, device)
    return None if found is None else found[0]


def origin(codec_name: str, ranks: int, device=None) -> Path | None:
    """Returns the file of what `find` returns."""
    found = _found(codec_name, ranks, device)
    return None if found is None else found[1]


def _found(codec_name: str, ranks: int, device) -> tuple[Tuned, Path] | None:
    device = region_device() if device is None else device
    file = path(device.platform)
    if file is None:
        return None
    for each in (file, *([MEASURED] if device.platform != "cpu" else [])):
        found = read(each).get(entry_name(device.device_kind, ranks), {}).get(codec_name)
        if found is not None:
            return found, each
    return None


def allowed(device, link: str, one_kernel: bool = True) -> timings.Allowed:
    """Which ways are open to a message on such devices. link: as of `Compression`; one_kernel: it can be one."""
    open_links = {"nccl"} if link != "nvlink" else set()
    if link == "nvlink" or (one_kernel and in_one_kernel(device, link)):
        open_links.add("nvlink")
    return lambda way: way.link in open_links


def default_min_bytes(codec_name: str, ranks: int, device=None, link: str = "auto") -> int:
    """The size from which a sum is compressed when its `min_bytes` is None, and other messages that were not timed.

    link: as of `Compression`.
    """
    device = region_device() if device is None else device
    tuned = find(codec_name, ranks, device)
    if tuned is None:
        return untuned_min_bytes(device, link)
    least = tuned.min_bytes
    if "psum" in tuned.times:
        least = timings.threshold(tuned.times["psum"], allowed(device, link))
    return NEVER if least is None else least


def untuned_min_bytes(device, link: str) -> int:
    """The message size from which a layer compresses where nothing was measured. link: as of `Compression`."""
    if device.platform == "cpu":
        return 0
    if hardware.missing(device.device_kind) is not None:
        return DEFAULT_MIN_BYTES
    return NVLINK_MIN_BYTES if in_one_kernel(device, link) else SEPARATE_MIN_BYTES


def in_one_kernel(device, link: str) -> bool:
    """Returns whether collectives on such devices may be one kernel over NVLink, as far as the devices decide that."""
    if link == "nccl" or hardware.missing(device.device_kind) is not None:
        return False
    return nvlink.why_device_unsupported(device) is None


def hierarchical_min_bytes(device=None) -> int:
    """The message size from which algorithm="auto" goes in levels where an axis spans hosts; on CPU every one."""
    device = region_device() if device is None else device
    return 0 if device.platform == "cpu" else HIERARCHICAL_MIN_BYTES


def transport(codec_name: str, ranks: int, nbytes: int) -> tuple[int, str]:
    """(chunks, exchange) of a message that leaves them open: the fastest measured, else one all_to_all."""
    tuned = find(codec_name, ranks)
    return (1, "all_to_all") if tuned is None else tuned.transport(nbytes)


def winner(codec_name: str, ranks: int, nbytes: int) -> tuple[int, int, str] | None:
    """`Tuned.winner` of a sum that leaves its algorithm open; None where nothing was measured."""
    tuned = find(codec_name, ranks)
    return None if tuned is None else tuned.winner(nbytes)
