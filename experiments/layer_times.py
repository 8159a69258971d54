"""Where the time of a decoder's layers goes, from the listings of kernels that `bench_step.py --profile` leaves.

    python experiments/layer_times.py experiments/results/STEP [--kernels 40]

A forward layer lasts from the start of one attention kernel to that of the next one, a backward layer between the
starts of attention's gradients. Times are means over a device's layers, in microseconds. The GPU that computes slowest
sets the pace: the other one's waits cost nothing, so tables are of the device whose kernels for sums take least.

output    a table of the variants, and how much longer products take for waiting on the slowest GPU; with --kernels the
          longest kernels of a layer of each
"""

from __future__ import annotations

import argparse
import collections
import csv
import re
import statistics
from pathlib import Path
from typing import NamedTuple

FORWARD, BACKWARD = r"fprop", r"bprop"
WAITS = r"MultiGpuBarrier|nccl.*AllReduce"
SUMS = r"nccl(?!.*MultiGpuBarrier)|nvlink.*mosaic"
KINDS = {
    "products": r"gemm|nvjet|cudnn|sdpa|fmha",
    "sums": r"nccl|nvlink.*mosaic|(encode|reduce)_tiles",
    "waits before sums": r"MultiGpuBarrier",
    "all else": r"",
}


class Kernel(NamedTuple):
    """A kernel on one device, in microseconds."""

    start: float
    length: float
    name: str


def read(listing: Path) -> dict[str, list[Kernel]]:
    """Returns each device's kernels, in the order in which they start."""
    found = collections.defaultdict(list)
    with listing.open() as file:
        for row in csv.DictReader(file):
            name = re.sub(r"[(<].*", "", row["kernel"])
            found[row["device"]].append(Kernel(float(row["start_us"]), float(row["length_us"]), name))
    return {device: sorted(kernels) for device, kernels in found.items()}


def slowest(devices: dict[str, list[Kernel]]) -> list[Kernel]:
    """Returns the kernels of the device that waits least."""
    waits = lambda kernels: sum(k.length for k in kernels if re.search(WAITS, k.name))
    return min(devices.values(), key=waits)


def waiting(devices: dict[str, list[Kernel]]) -> float:
    """Returns how much longer products take for waiting on the slowest GPU, as a share of their mean time.

    All GPUs wait for each other at each sum. Between two sums the products of the slowest count.
    """
    between = []
    for kernels in devices.values():
        times = [0.0]
        for kernel in kernels:
            if re.search(KINDS["products"], kernel.name):
                times[-1] += kernel.length
            elif re.search(SUMS, kernel.name) and times[-1]:
                times.append(0.0)
        between.append(times)
    if len({len(times) for times in between}) > 1:
        raise ValueError("the GPUs' numbers of sums differ: the listing is not of whole steps")
    return sum(map(max, zip(*between))) * len(between) / sum(map(sum, between)) - 1


def layers(kernels: list[Kernel], backward: bool) -> list[list[Kernel]]:
    """Returns the kernels of each whole layer of one direction, attention's own first."""
    marks = [i for i, k in enumerate(kernels) if re.search(f"{FORWARD}|{BACKWARD}", k.name)]
    kinds = "".join("b" if re.search(BACKWARD, kernels[i].name) else "f" for i in marks)
    # With remat a backward layer has the forward's attention again, right before its gradient.
    pattern, distance = (r"b(?=f?b)", None) if backward else (r"f(?=f[^b])", 1)
    found = []
    for match in re.finditer(pattern, kinds):
        end = kinds.index("b", match.start() + 1) if distance is None else match.start() + distance
        found.append(kernels[marks[match.start()] : marks[end] + 1])
    return found


def period(found: list[list[Kernel]]) -> float:
    return statistics.mean(layer[-1].start - layer[0].start for layer in found)


def by_kind(found: list[list[Kernel]]) -> dict[str, float]:
    """Returns the time in kernels of each kind; kernels that run side by side count twice."""
    times = dict.fromkeys(KINDS, 0.0)
    for kernel in (kernel for layer in found for kernel in layer[:-1]):
        kind = "waits before sums" if re.search(KINDS["waits before sums"], kernel.name) else None
        kind = kind or next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.name))
        times[kind] += kernel.length / len(found)
    return times


def longest(found: list[list[Kernel]], count: int) -> list[str]:
    """Returns lines of the longest kernels of a layer; the second of a name is another kernel."""
    times = collections.defaultdict(list)
    for layer in found:
        seen = collections.Counter()
        for kernel in layer[:-1]:
            times[kernel.name, seen[kernel.name]].append(kernel.length)
            seen[kernel.name] += 1
    means = {key: sum(lengths) / len(found) for key, lengths in times.items()}
    return [f"{us:9.1f}  {name}" for (name, _), us in sorted(means.items(), key=lambda item: -item[1])[:count]]


def table(variants: dict[str, list[Kernel]]) -> list[str]:
    """Returns a table of both directions; cost: the time beyond `free`'s."""
    lines = ["| variant | layer | us | beyond `free` | " + " | ".join(KINDS) + " |", "|---" * (4 + len(KINDS)) + "|"]
    for backward in (False, True):
        found = {name: layers(kernels, backward) for name, kernels in variants.items()}
        least = period(found["free"]) if "free" in found else None
        for name, of_layers in found.items():
            us, kinds = period(of_layers), by_kind(of_layers)
            beyond = "" if least is None else f"{us - least:.0f}"
            cells = " | ".join(f"{kinds[kind]:.0f}" for kind in KINDS)
            lines.append(f"| {name} | {'backward' if backward else 'forward'} | {us:.0f} | {beyond} | {cells} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels of a layer of each variant")
    args = parser.parse_args()
    listings = sorted(args.folder.glob("kernels-*.csv"))
    if not listings:
        parser.error(f"{args.folder}: has no kernels-*.csv; bench_step.py --profile 2 writes them")
    read_ = {path.stem.removeprefix("kernels-"): read(path) for path in listings}
    variants = {name: slowest(devices) for name, devices in read_.items()}
    print("\n".join(table(variants)))
    if all(len(devices) > 1 for devices in read_.values()):
        print("\n| variant | products longer by the slowest GPU |\n|---|---|")
        print("\n".join(f"| {name} | {waiting(devices):.2%} |" for name, devices in read_.items()))
    for name, kernels in variants.items():
        for direction, backward in (("forward", False), ("backward", True)) if args.kernels else ():
            print("\n".join(["", f"{name}, {direction} layer, us", *longest(layers(kernels, backward), args.kernels)]))


if __name__ == "__main__":
    main()
