"""The table of a plan, in lines: what was measured at each site and direction, its codec, what it is predicted to
cost."""

from __future__ import annotations

import math

from taco_jax.compression.plan_file import PlanFile

HEAD = (
    f"{'site':24}{'direction':10}{'kurtosis':>9}{'outlying':>9}{'felt':>10}  {'codec':34}{'bits':>6}{'SNR dB':>8}"
    f"{'cost':>10}"
)


def lines(plan: PlanFile, use: str) -> list[str]:
    """Returns the lines that the command prints.

    felt: `sensitivity` of a forward message (with feedback, where the plan has that), `gradient_sensitivity` of a
    backward one.
    """
    made = plan.made
    out = [HEAD]
    for site, of_site in plan.sites.items():
        for direction in ("forward", "backward"):
            measured = getattr(of_site, f"{direction}_measured")
            if measured is None:
                continue
            codec = getattr(of_site, direction)
            fed = of_site.error_feedback and direction == "forward" and codec != "none"
            felt = measured.get("sensitivity_with_feedback") if fed else measured.get("sensitivity")
            felt = measured.get("gradient_sensitivity", 0.0) if direction == "backward" else felt or 0.0
            snr = f"{measured['snr_db']:8.1f}" if "snr_db" in measured else f"{'exact':>8}"
            out.append(
                f"{site:24}{direction:10}{measured['kurtosis']:9.1f}{measured['outlying_channels']:9.0f}{felt:10.2e}  "
                f"{codec + (' +feedback' if fed else ''):34}{measured['bits']:6.3f}{snr}{measured['cost']:10.2e}"
            )
    rise = made["predicted_rise"]
    what = f"{100 * rise / made['loss']:.3f} % of the loss {made['loss']:.4f}"
    if use == "first_token":
        what = f"{100 * math.expm1(rise):.3f} % of the perplexity"
    out.append(
        f"{made['bits']:.3f} bits an element, {16 / made['bits']:.2f} times fewer bytes than bf16; predicted to cost "
        f"{rise:.3g} nats, {what}"
    )
    return out
