"""The tables of what compilers say of the kernels (kernel_targets.py), from its summary."""

from __future__ import annotations

import re
from collections.abc import Sequence

import runs
from gpu_targets import TARGETS


def cell(row: dict | None) -> str:
    """Returns what compilers say of a kernel, in a few figures."""
    if row is None:
        return ""
    if "reason" in row:
        return "no"
    spilled = f" ({row['spilled']} B spilled)" if row["spilled"] else ""
    parts = [f"{row['registers']}{spilled}", f"{row['shared'] / 1024:.0f}"]
    if "programs" in row:
        parts.append(f"{row['resident']} of {row['programs']}")
    return " / ".join(parts)


def matrix(rows: dict[str, dict], columns: Sequence[str], first: str) -> list[str]:
    """Returns a table's lines. rows: {row: {column: found}}. first: the name of the rows."""
    lines = [f"| {first} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for name, by in rows.items():
        lines.append(f"| {name} | {' | '.join(cell(by.get(column)) for column in columns)} |")
    return lines


def totals(found: dict, dtypes: Sequence[str]) -> list[str]:
    """Returns the lines of the table of all kernels of a target together."""
    lines = [
        "| target | kernels | compiled | spill | most registers | most shared memory, KiB (limit) |",
        "|---" * 6 + "|",
    ]
    for arch, by in found.items():
        rows = [row for dtype in dtypes for operations in by.get(dtype, {}).values() for row in operations.values()]
        good = [row for row in rows if "reason" not in row]
        limit = TARGETS[int(re.sub(r"\D", "", arch))].shared_of_block
        most = max((row["registers"] for row in good), default=0)
        shared = max((row["shared"] for row in good), default=0) / 1024
        spilling = sum(row["spilled"] > 0 for row in good)
        lines.append(f"| {arch} | {len(rows)} | {len(good)} | {spilling} | {most} | {shared:.0f} ({limit}) |")
    return lines


def reasons(found: dict) -> list[str]:
    """Returns lines of what did not compile, with its targets, codecs and operations."""
    by: dict[tuple[str, str], list[str]] = {}
    for arch, dtypes in found.items():
        for dtype, codecs in dtypes.items():
            for codec, operations_ in codecs.items():
                for name, row in operations_.items():
                    if "reason" in row:
                        by.setdefault((arch, row["reason"]), []).append(f"{codec} {name} {dtype}")
    return [f"* {arch}: {reason}: {', '.join(names)}" for (arch, reason), names in by.items()]


def report(found: dict, named_commit: str | None) -> str:
    """Returns the README of a summary."""
    lines = runs.header("The kernels compiled for GPUs of every kind", named_commit)
    lines += [
        f"Compiled, not run. Assembler: ptxas {found['ptxas']}; triton {found['triton_version']}.",
        "A cell is: registers of a thread / KiB of shared memory of a program / programs that a multiprocessor holds",
        "at once, of those that are started for it. `no`: it does not compile, for the reason below its table.",
        "",
    ]
    for backend in ("triton", "mosaic"):
        tables = found[backend]
        if not tables:
            continue
        dtypes = list(dict.fromkeys(dtype for by in tables.values() for dtype in by))
        lines += [f"## {backend.capitalize()}", "", *totals(tables, dtypes), ""]
        for dtype in dtypes:
            rows: dict[str, dict] = {}
            for arch, by in tables.items():
                for codec, operations_ in by.get(dtype, {}).items():
                    for name, row in operations_.items():
                        rows.setdefault(f"{codec} {name}", {})[arch] = row
            lines += [f"### {dtype}", "", *matrix(rows, list(tables), "codec and operation"), ""]
        lines += [*reasons(tables), ""]
    if found["nvlink"]:
        lines += ["## One kernel over NVLink", ""]
        archs = list(found["nvlink"])
        rows = {name: {a: found["nvlink"][a].get(name) for a in archs} for name in found["nvlink"][archs[0]]}
        lines += [*matrix(rows, archs, "kernel on two GPUs, bfloat16"), ""]
        for arch, by in found["nvlink"].items():
            why = {row["reason"] for row in by.values() if "reason" in row}
            lines += [f"* {arch}: {reason}" for reason in sorted(why)]
        lines.append("")
    lines += [
        "## What runs there",
        "",
        "With what these kernels need (jax-triton 0.3 and jax below 0.12 for Triton's).",
        "",
    ]
    lines += ["| target | card | codec | what `taco_jax` takes | why |", "|---" * 5 + "|"]
    for arch, by in found["chosen"].items():
        groups: dict[tuple, list[str]] = {}
        for codec, operations_ in by.items():
            answers = {tuple(answer) for answer in operations_.values()}
            groups.setdefault(tuple(sorted(answers)), []).append(codec)
        card = TARGETS[int(re.sub(r"\D", "", arch))].device
        for answers, codecs in groups.items():
            which = "all" if len(codecs) == len(by) else ", ".join(codecs)
            names, why = ("; ".join(dict.fromkeys(part)) for part in zip(*answers))
            lines.append(f"| {arch} | {card} | {which} | {names} | {why} |")
    return "\n".join(lines).rstrip() + "\n"
