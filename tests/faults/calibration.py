"""Faults of calibration: what a probe measures, what an error is said to cost, which plan is refused."""

from faults.mutant import Mutant

PROBE = ("tests/calibration/test_probe.py",)
PLANS = ("tests/calibration/test_plans.py",)
FILE = ("tests/compression/test_plan_file.py",)
COMMAND = ("tests/calibration/test_calibrate.py",)
MUTANTS = (
    Mutant(
        "calibration-fed",
        "an error that the next sum takes along is said to stay",
        "taco_jax/calibration/probe.py",
        "g_fed = g32 - lax.pmean(after, operation.forward.axis).astype(jnp.float32) if fed else None",
        "g_fed = g32 if fed else None",
        PROBE,
    ),
    Mutant(
        "calibration-gather",
        "the gradient at a gather's result is that of one rank",
        "taco_jax/calibration/probe.py",
        "            whole = lax.psum(g, operation.forward.axis)",
        "            whole = g",
        PROBE,
    ),
    Mutant(
        "calibration-switch",
        "the error of a backward message is injected by the forward switch",
        "taco_jax/calibration/probe.py",
        "probe.injected, g), switches[1])",
        "probe.injected, g), switches[0])",
        PROBE,
    ),
    Mutant(
        "calibration-by-token",
        "squares of g e by element are of absolute errors",
        "taco_jax/calibration/probe.py",
        "    product = g * error\n",
        "    product = g * jnp.abs(error)\n",
        PROBE,
    ),
    Mutant(
        "calibration-half",
        "the second order lacks its half",
        "taco_jax/calibration/measure.py",
        "        return sums / (2 * self.tokens)",
        "        return sums / self.tokens",
        PLANS,
    ),
    Mutant(
        "calibration-copies",
        "what every rank has measured of one result counts as often as there are ranks",
        "taco_jax/calibration/measure.py",
        ".sum(1) / copies",
        ".sum(1)",
        PLANS,
    ),
    Mutant(
        "calibration-outlying",
        "outlying channels are told by their squares",
        "taco_jax/calibration/measure.py",
        "OUTLYING**2 * median_N",
        "OUTLYING * median_N",
        PLANS,
    ),
    Mutant(
        "calibration-gradient",
        "what errors do to gradients costs nothing",
        "taco_jax/calibration/plans.py",
        "    return rise + GRADIENT_WEIGHT * share",
        "    return rise + 0 * share",
        PLANS,
    ),
    Mutant(
        "calibration-calls",
        "a site of all layers counts as one message",
        "taco_jax/calibration/plans.py",
        "            c: max(1, statistics.layers) * elements * bits_of(c, elements) if",
        "            c: elements * bits_of(c, elements) if",
        PLANS,
    ),
    Mutant(
        "calibration-delivered",
        "what inference adds exactly behind the last sum is said to cost what it would there",
        "taco_jax/calibration/plans.py",
        "        if fed and site in delivered:",
        "        if False:",
        PLANS,
    ),
    Mutant(
        "calibration-knapsack",
        "of each message the option of the most cost is taken",
        "taco_jax/calibration/allocation.py",
        "pick = with_option.argmin(0)",
        "pick = with_option.argmax(0)",
        ("tests/calibration/test_allocation.py",),
    ),
    Mutant(
        "plan-model",
        "a plan of another shape is taken",
        "taco_jax/compression/plan_file.py",
        "            if planned[key] != shape[key]:",
        "            if False:",
        FILE,
    ),
    Mutant(
        "plan-base",
        "a plan's sites lose the other options of the flags",
        "taco_jax/compression/plan_file.py",
        "dataclasses.replace(base if base is not None else Compression(), **changes)",
        "dataclasses.replace(Compression(), **changes)",
        FILE,
    ),
    Mutant(
        "plan-pattern",
        "in inference the plan's file goes before patterns",
        "taco_jax/inference/settings.py",
        "for name, compression in of_file if name not in rules}",
        "for name, compression in of_file}",
        (f"{COMMAND[0]} -k by_layer",),
    ),
)
