"""Compile time that the compiler hook of `taco_jax.compressed` adds, for a decoder of unrolled layers.

    python experiments/bench_dropin_compile.py --out experiments/results/dropin_compile

Loss and gradients of 32 layers (attention and a gated MLP, tensor parallelism 2 and data parallelism 2) are compiled
for four emulated CPU devices, exactly and under plans, each in a process of its own and in turn. Nothing is run. CPU
seconds are those of all threads. The hook's are among them: rewriting the module, tracing and compiling replacements.
What is left above the exact program is XLA's time for what the hook has put in.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import runs
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax.config import cli
from taco_jax.dropin import hook

# Four emulated devices, compiled as users do, nothing from a cache.
EMULATED = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
WITHOUT = ("JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")
WIDTH, HEADS, HIDDEN, TOKENS = 256, 4, 1024, 128
PLANS = {
    "exact": {},
    "tensor": {"tensor": "int8h"},
    "tensor and data": {"tensor": "int8h", "data": "int8h"},
}


def model(on: Mesh, layers: int):
    """(loss and gradients of a decoder's layers in a row, shapes of their weights and activations)."""
    constraint = NamedSharding(on, P("data"))

    def norm(x):
        scale = jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6)
        return (x.astype(jnp.float32) * scale).astype(x.dtype)

    def layer(x, w):
        split = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        h = norm(x)
        attended = jax.nn.dot_product_attention(*(split(h @ w[name]) for name in "qkv"), is_causal=True)
        x = x + jax.lax.with_sharding_constraint(attended.reshape(x.shape) @ w["o"], constraint)
        h = norm(x)
        return x + jax.lax.with_sharding_constraint(
            (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], constraint
        )

    def loss(ws, x):
        for n in range(layers):
            x = layer(x, jax.tree.map(lambda w, n=n: w[n], ws))
        return (x.astype(jnp.float32) ** 2).mean()

    def weights(rows, columns, *spec):
        return jax.ShapeDtypeStruct((layers, rows, columns), jnp.bfloat16, sharding=NamedSharding(on, P(None, *spec)))

    column, row = (None, "tensor"), ("tensor", None)
    ws = {name: weights(WIDTH, WIDTH, *column) for name in "qkv"} | {"o": weights(WIDTH, WIDTH, *row)}
    ws |= {name: weights(WIDTH, HIDDEN, *column) for name in ("gate", "up")} | {"down": weights(HIDDEN, WIDTH, *row)}
    x = jax.ShapeDtypeStruct((2, TOKENS, WIDTH), jnp.bfloat16, sharding=NamedSharding(on, P("data")))
    return jax.value_and_grad(loss), (ws, x)


def both_clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> dict[str, float]:
    return dict(zip(("seconds", "cpu"), (now - then for now, then in zip(both_clocks(), start))))


def measure(name: str, layers: int) -> dict:
    """Compiles once, in this process: seconds and CPU seconds, those in the hook, and the program's size."""
    spent: list[dict] = []
    rewrite = hook.rewrite

    def timed(*args):
        start = both_clocks()
        try:
            return rewrite(*args)
        finally:
            spent.append(since(start))

    hook.rewrite = timed
    on = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    # What a process does once: threads, LLVM's tables.
    jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((8, 8))).compile()
    f, args = model(on, layers)

    def compile_() -> tuple[dict, object]:
        lowered = jax.jit(f).lower(*args)
        start = both_clocks()
        compiled = lowered.compile()
        return since(start), compiled

    sites = []
    if PLANS[name]:
        with taco_jax.compressed(PLANS[name], require=0.95) as report:
            whole, compiled = compile_()
        sites = report.sites
    else:
        whole, compiled = compile_()
    hooked = {key: sum(s[key] for s in spent) for key in ("seconds", "cpu")}
    return whole | {
        "hook_seconds": hooked["seconds"], "hook_cpu": hooked["cpu"],
        "compressed": sum(site.compressed for site in sites),
        "lines": len(compiled.as_text().splitlines()),
    }  # fmt: skip


def table(results: dict[str, list[dict]]) -> list[str]:
    """Medians of each plan, beside the exact program's."""
    lines = [
        "| plan | compressed | lines of HLO | s | CPU s | of them the hook | times exact | CPU s more |",
        "|---|---|---|---|---|---|---|---|",
    ]
    of = lambda name, key: statistics.median(r[key] for r in results[name])
    for name in results:
        cpu, exact = of(name, "cpu"), of("exact", "cpu")
        lines.append(
            f"| {name} | {of(name, 'compressed'):.0f} | {of(name, 'lines'):,.0f} | {of(name, 'seconds'):.1f} | "
            f"{cpu:.1f} | {of(name, 'hook_cpu'):.1f} | {cpu / exact:.2f} | {cpu - exact:.1f} |"
        )
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=PLANS, help="compiles once, in this process of four devices, and prints JSON")
    args = parser.parse_args(arguments)
    for key in ("layers", "repeats"):
        runs.require(getattr(args, key) > 0, f"--{key}", getattr(args, key), "must be 1 or more")
    if args.only:
        count = len(jax.devices())
        runs.require(count == 4, "devices", count, f"must be 4: set {' '.join(map('='.join, EMULATED.items()))}")
        print(json.dumps(measure(args.only, args.layers)))
        return
    runs.require(args.out, "--out", args.out, "name a folder for the results")
    runs.folder("--out", args.out)
    environment = {name: value for name, value in os.environ.items() if name not in WITHOUT} | EMULATED
    results: dict[str, list[dict]] = {name: [] for name in PLANS}
    for _ in range(args.repeats):
        for name in PLANS:
            command = [sys.executable, __file__, "--layers", str(args.layers), "--only", name]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, results[name][-1], flush=True)
    report = [
        *runs.header("Compiling under the hook"),
        f"{args.layers} unrolled layers, forward and backward, for four emulated devices; medians of {args.repeats}.",
        "",
        *table(results),
    ]
    runs.write(args.out, report, {"layers": args.layers, "runs": results})


if __name__ == "__main__":
    sys.exit(cli.run(main))
