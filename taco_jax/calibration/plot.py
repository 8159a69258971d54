"""The picture of a plan: bits, and how much an error is felt, by site. Needs no display."""

from __future__ import annotations

from pathlib import Path

from taco_jax.compression.plan_file import PlanFile


def draw(path: Path, plan: PlanFile) -> None:
    """Writes the picture: above the bits of each site and direction, below how much an error there is felt.

    Sites of layers go from left to right by layer, one line for each kind.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows: dict[str, list[tuple[str, dict]]] = {}
    for site, of_site in plan.sites.items():
        parts = site.split("/")
        number = parts[1] if len(parts) > 2 and parts[1].isdigit() else None
        kind = "/".join(parts[2:]) if number else site
        for direction in ("forward", "backward"):
            measured = getattr(of_site, f"{direction}_measured")
            if measured is not None:
                label = number if number is not None else f"{site}\n{direction}"
                rows.setdefault(f"{kind}, {direction}" if number else "sites", []).append((label, dict(measured)))
    inches = {kind: (1.3 if kind == "sites" else 0.28) * len(of_kind) for kind, of_kind in rows.items()}
    width = max(6.0, *inches.values())
    figure = Figure(figsize=(min(width, 20), 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for kind, of_kind in rows.items():
        labels = [label for label, _ in of_kind]
        above.plot(labels, [measured["bits"] for _, measured in of_kind], "o-", label=kind, drawstyle="steps-mid")
        felt = lambda measured: measured.get(
            "sensitivity_with_feedback", measured.get("sensitivity", measured.get("gradient_sensitivity", 0.0))
        )
        below.plot(labels, [max(felt(measured), 1e-12) for _, measured in of_kind], "o-", label=kind)
    above.set(ylabel="bits an element", title=f"{plan.made.get('budget', '')}: {plan.made.get('bits', 0):.3f} bits")
    below.set(yscale="log", ylabel="nats for a relative\nsquared error of 1", xlabel="layer" if len(rows) > 1 else "")
    below.legend(fontsize=8)
    below.tick_params(axis="x", labelsize=7)
    figure.savefig(path, dpi=110)
