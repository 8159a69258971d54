"""Plain functions for tests: `from helpers import make_mesh, run_python`. Importing this module does not import jax."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# Fusions become LLVM code by way of MLIR, which takes more than half of a step's compile time on CPU; XLA's older
# emitters, which jax 0.10 and 0.11 still have, do without. (jax 0.12 ignores the first flag.) One LLVM module instead
# of 32 saves a seventh of the rest.
QUICK_COMPILING = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def quick_compiling(environment: Mapping[str, str | None] = os.environ) -> list[str]:
    """Flags of XLA for a process with these variables: QUICK_COMPILING, unless it compiles as users do."""
    return [*QUICK_COMPILING] if environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1" else []


def cpu_environment(devices: int = 8, environment: Mapping[str, str | None] = os.environ) -> dict[str, str]:
    """The variables that make jax emulate `devices` CPU devices; other XLA flags that are set stay."""
    flags = [
        *_foreign_xla_flags(),
        *quick_compiling(environment),
        f"--xla_force_host_platform_device_count={devices}",
        # Eight devices on two cores may keep each other waiting for longer than XLA's limit, which aborts the process.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}


def _foreign_xla_flags() -> list[str]:
    ours = (
        "--xla_force_host_platform_device_count", "--xla_cpu_collective_call_terminate_timeout_seconds",
        *QUICK_COMPILING,
    )  # fmt: skip
    return [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(ours)]


def until(condition: Callable[[], object], what: str, *, seconds: float = 540, pause: float = 0.01) -> None:
    """Returns once `condition` is true.

    Fails after `seconds`, a small part of which is enough on an idle machine, and says that it was this limit.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"limit of {seconds:g} s: waited for {what}"
        time.sleep(pause)


def make_mesh(dp: int = 1, pp: int = 1, tp: int = 1, *, explicit: bool = False):
    """A mesh of the first dp*pp*tp devices, axes ("dp", "pp", "tp"), Auto or Explicit. Too few skip the test."""
    import jax
    import pytest
    from jax.sharding import AxisType

    need, have = dp * pp * tp, len(jax.devices())
    if have < need:
        pytest.skip(f"needs {need} devices, there are {have}")
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh((dp, pp, tp), ("dp", "pp", "tp"), axis_types=(kind,) * 3, devices=jax.devices()[:need])


def run_python(
    code_or_argv: str | Sequence[object],
    *,
    devices: int | None = 8,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike | None = None,
    timeout: float = 540,
    check: int | None = 0,
) -> subprocess.CompletedProcess:
    """Run Python in a fresh process that imports the packages of this checkout; returns its stdout and stderr as text.

    Args:
        code_or_argv: source text for `python -c`, or a list of arguments, `["-m", "taco_jax.train", "--help"]`.
        devices: emulated CPU devices; None sets no JAX_PLATFORMS, and no XLA_FLAGS but those of `quick_compiling`.
        env: variables to set; a value of None removes one.
        cwd: working directory.
        timeout: seconds. One that takes longer fails, and what it has printed is in the failure message.
        check: the exit status to insist on (the output is in the failure message); None accepts any.
    """
    arguments = ["-c", code_or_argv] if isinstance(code_or_argv, str) else [str(a) for a in code_or_argv]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    variables = {**os.environ, **(env or {})}
    if devices is not None:
        environment |= cpu_environment(devices, variables)
    elif quick_compiling(variables):
        environment["XLA_FLAGS"] = " ".join(quick_compiling(variables))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    try:
        result = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        text = lambda output: (output or b"").decode(errors="replace")[-4000:]
        raise AssertionError(
            f"limit of {timeout:g} s: python {' '.join(arguments)[:500]} had not ended\n"
            f"--- stdout\n{text(error.stdout)}\n--- stderr\n{text(error.stderr)}"
        ) from None
    if check is not None and result.returncode != check:
        raise AssertionError(
            f"python {' '.join(arguments)[:500]}\nexit status {result.returncode}, expected {check}\n"
            f"--- stdout\n{result.stdout[-4000:]}\n--- stderr\n{result.stderr[-8000:]}"
        )
    return result
