"""What the hook adds to compiling 32 unrolled layers (`experiments/bench_dropin_compile.py`)."""

import json

import pytest

LAYERS = 32


@pytest.mark.slow
def test_compiling_costs_half_as_much_again_or_ten_seconds(run_python, repository):
    """In CPU seconds, on which other work of the machine has least influence."""

    def compiled(plan):
        program = [repository / "experiments/bench_dropin_compile.py", "--layers", LAYERS, "--only", plan]
        as_users_do = {"JAX_COMPILATION_CACHE_DIR": None, "JAX_DISABLE_MOST_OPTIMIZATIONS": None}
        return json.loads(run_python(program, devices=4, env=as_users_do).stdout.splitlines()[-1])

    exact = compiled("exact")
    for plan, sums in (("tensor", 4 * LAYERS), ("tensor and data", (4 + 7) * LAYERS)):
        ours = compiled(plan)
        print(f"compiling {LAYERS} layers, {plan}: {exact['cpu']:.1f} CPU s exact, {ours['cpu']:.1f} under the hook")
        assert ours["compressed"] >= sums
        assert ours["cpu"] < max(1.5 * exact["cpu"], exact["cpu"] + 10)
