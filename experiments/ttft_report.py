"""Tables of all links, and a picture: the report that bench_ttft.py leaves beside its numbers."""

from __future__ import annotations

from pathlib import Path

TITLES = {"nvlink": "NVLink", "host": "Host memory (NCCL_P2P_DISABLE=1)", "cpu": "Emulated on a CPU"}


def report(summary: dict) -> list[str]:
    lines = [f"# Time to first token: {summary['model']}, {summary['layers']} layers, tp {summary['tp']}", ""]
    for go in summary["goes"]:
        lines += [f"* {field}: {value}" for field, value in go.items()] + [""]
    lines += [
        "Random weights, greedy choice, bfloat16. Milliseconds from a prompt's ids on the host to the first token "
        "there, medians of rounds in which each variant has its turn (fastest, slowest); behind them how many times as "
        "fast as `none`. `free` sends nothing: no variant can be faster.",
    ]  # fmt: skip
    for link, shapes in summary["results"].items():
        measured = {name: found for name, found in shapes.items() if "skipped" not in found}
        names = list(dict.fromkeys(variant for found in measured.values() for variant in found))
        lines += ["", f"## {TITLES.get(link, link)}", ""]
        if names:
            lines += ["| batch x tokens | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
        for name, found in measured.items():
            cells = [_cell(found[variant]) if variant in found else "" for variant in names]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        skipped = [f"* {name}: skipped, {found['skipped']}." for name, found in shapes.items() if "skipped" in found]
        lines += [*([""] if names and skipped else []), *skipped]
    return lines


def _cell(r: dict) -> str:
    return f"{r['ms']:.1f} ({r['fastest_ms']:.1f}, {r['slowest_ms']:.1f}) {r['speedup']:.2f}x"


def plot(summary: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = {
        link: {tuple(map(int, name.split("x"))): r for name, r in found.items() if "skipped" not in r}
        for link, found in summary["results"].items()
    }
    links = {link: found for link, found in measured.items() if found}
    batches = sorted({batch for found in links.values() for batch, _ in found})
    if not batches:
        return
    size = {"figsize": (3.2 * len(batches) + 1, 3 * len(links)), "squeeze": False, "sharey": "row"}
    figure, axes = plt.subplots(len(links), len(batches), **size)
    for row, (link, found) in zip(axes, links.items()):
        names = list(dict.fromkeys(variant for r in found.values() for variant in r if variant != "none"))
        for axis, batch in zip(row, batches):
            for name in names:
                points = sorted((n, r[name]["speedup"]) for (b, n), r in found.items() if b == batch and name in r)
                x, y = [n for n, _ in points], [speedup for _, speedup in points]
                axis.plot(x, y, "--" if name == "free" else "-", marker="o", label=name)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{TITLES.get(link, link)}, batch {batch}", fontsize=9)
            axis.set_xlabel("tokens of a prompt")
        row[0].set_ylabel("times as fast as exact")
        row[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
