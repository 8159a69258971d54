"""Times kernels alone on one GPU: products, cuDNN's attention, passes over memory, and the start of a kernel.

    python experiments/bench_kernels.py --out experiments/results/kernels_h200

The forecast's constants are fitted on these (experiments/fit_forecast.py); no step and no first token is among them.

products    bfloat16, shapes on a grid of tokens and of widths: forward x [m, k] @ w [k, n]; dx x [m, k] @ w [n, k]^T;
            dw x [k, m]^T @ y [k, n] to float32
mixed       one large product, and so many passes over memory behind each: a GPU that does nothing but multiply reaches
            its limit of power, and lowers its clocks
attention   cuDNN's, causal, forward and backward, heads of 64 and 128
passes      elementwise, norms over the last dim, sums over the first, AdamW
starts      kernels of 4 kB, one after the other, in a straight program and in a loop; and from three small arrays of
            the host to one of its again by a program of one kernel, as for a prompt

One program holds several kernels of a kind, each with operands of its own and an order between them, and programs are
queued: what is timed is a kernel with its start, as in a step. Each is warmed up until the clocks have fallen to what
they are under load.

output    OUT/README.md (hardware, commit, command, tables), OUT/summary.json
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import runs
import timing
from jax import lax

from taco_jax.config import cli

# (form, m, n, k), in the order in which they are measured. Widths are those of the presets, whole and cut over tp.
WIDE = ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584))
NARROW = ((768, 1152), (384, 768), (768, 1536), (1536, 768), (1024, 2048), (512, 1024), (2048, 1024))
CUT = ((3584, 1152), (896, 3584), (3584, 9472), (4736, 3584))
PRODUCTS = (
    *(("forward", 512, n, k) for k, n in WIDE),
    *(("forward", 65536, n, k) for k, n in NARROW),
    *(("forward", 16384, n, k) for k, n in CUT),
    *(("dw", k, n, 65536) for k, n in NARROW[:6]),
    *(("dw", k, n, 16384) for k, n in CUT),
    *(("dx", 65536, k, n) for k, n in NARROW[:4]),
    *(("dx", 16384, k, n) for k, n in CUT[2:]),
    ("forward", 1, 152064, 3584),
    ("forward", 8192, 25216, 768), ("dx", 8192, 768, 25216), ("dw", 768, 25216, 8192),
    *(("forward", m, n, k) for m in (64, 256, 1024, 4096) for k, n in WIDE[1:4:2]),
    *(("forward", 32768, n, k) for k, n in ((768, 576), (192, 768), (768, 768))),
    *(("forward", m, 3072, 1024) for m in (64, 512, 2048, 8192)),
    *(("dw", 1024, 3072, k) for k in (512, 4096)),
    ("forward", 2048, 2048, 2048), ("forward", 8192, 8192, 8192),
)  # fmt: skip
# Of [MIXED, MIXED] @ [MIXED, MIXED], each followed by so many passes over so many values.
MIXED, MIXED_PASSES, MIXED_VALUES = 8192, (0, 1, 2, 3, 5), 1 << 28
# (sequences, length, heads, kv heads, width of a head)
ATTENTION = (
    (64, 1024, 6, 6, 64), (8, 2048, 14, 2, 128), (1, 512, 28, 4, 128), (1, 8192, 28, 4, 128), (32, 1024, 3, 3, 64),
    (16, 512, 16, 16, 64), (4, 4096, 8, 8, 64), (1, 2048, 28, 4, 128),
)  # fmt: skip
# (kind, rows, columns)
PASSES = (
    *(("elementwise", rows, 1024) for rows in (64, 1024, 4096, 16384, 65536, 262144)),
    *(("sum", rows, columns) for rows, columns in ((65536, 768), (16384, 3584), (4096, 1024), (4096, 4096),
                                                   (65536, 384), (16384, 1024), (65536, 2048))),
    *(("norm", rows, columns) for rows, columns in ((512, 3584), (16384, 3584), (65536, 768), (4096, 1024))),
    ("adamw", 16384, 4096), ("adamw", 768, 1536),
)  # fmt: skip
KINDS = ("starts", "mixed", "passes", "products", "attention")
TINY, IN_LOOP, ROUNDS = 64, 16, 32
LEAST_US, MOST_KERNELS, MOST_BYTES = 1500.0, 24, 24e9
REPEATS = 5


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=None, help="begin no further kernel after so long")
    parser.add_argument("--only", default=None, help="kinds, such as starts,mixed; all by default")
    parser.add_argument(
        "--warm-up", type=float, default=0.0, help="seconds of load before each of them, beside a tenth"
    )
    parser.add_argument("--most-flops", type=float, default=None, help="leave out larger ones, as on a CPU")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    args.seconds = runs.limit("--seconds", args.seconds)
    runs.require(args.warm_up >= 0, "--warm-up", args.warm_up, "must be at least 0")
    only = None if args.only is None else runs.choices("--only", args.only, KINDS)
    runs.folder("--out", args.out)
    start, results = time.perf_counter(), {kind: [] for kind in KINDS}
    for kind, row, program, operands, calls, guess in kernels(args.most_flops):
        if args.seconds is not None and time.perf_counter() - start > args.seconds:
            print("no more time: the rest is left out", flush=True)
            break
        if only is not None and kind not in only:
            continue
        us = 1e6 * measured(program, operands(), calls, guess, args.warm_up)
        if kind == "attention" and row["what"] == "backward":
            # The program has both; a forward pass of the same shape came before.
            us -= next(r["us"] for r in results[kind] if r == row | {"what": "forward", "us": r["us"]})
        results[kind].append(row | {"us": us})
        print(f"{time.perf_counter() - start:6.1f} s  {kind:10} {json.dumps(row)} {us:10.2f} us", flush=True)
        (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")
    write(args, results)


def measured(program: Callable, operands: tuple, calls: int, guess: float, warm_up: float = 0.0) -> float:
    """Seconds of one of a program's `calls` kernels; guess: microseconds that one may take."""
    program = program if program is from_host_to_host else jax.jit(program)
    programs = min(20, max(2, math.ceil(20_000 / (guess * calls))))
    # A tenth of a second: clocks have then fallen to what the load leaves them.
    timing.seconds(program, *operands, calls=calls, programs=programs, repeats=5)
    start = time.perf_counter()
    while time.perf_counter() - start < warm_up:
        timing.seconds(program, *operands, calls=calls, programs=programs, repeats=1)
    return timing.seconds(program, *operands, calls=calls, programs=programs, repeats=REPEATS)


def kernels(most_flops: float | None) -> Iterator[tuple]:
    """(kind, row, program, its operands' maker, kernels of it, microseconds that one may take) of each."""
    small = lambda flops: most_flops is None or flops <= most_flops
    yield from starts()
    yield from mixed(small)
    parts = [passes(small), products(small), attention(small)]
    # In turn, so that a run that ends early has some of each.
    while parts:
        for part in list(parts):
            found = next(part, None)
            if found is None:
                parts.remove(part)
            else:
                yield found


def after(x: jax.Array, y):
    """x and y, x only once y is there: kernels that take x then come one after the other."""
    return lax.optimization_barrier((x, y))


def fitting(guess: float, nbytes: float) -> int:
    """Kernels of a program: enough to hide its start, as many as memory has room for."""
    return max(2, min(MOST_KERNELS, math.ceil(LEAST_US / guess), int(MOST_BYTES / nbytes)))


@functools.cache
def _of_host() -> Callable:
    return jax.jit(lambda x, tokens, length, seed: tokens[0] + length + seed + x[0].astype(jnp.int32))


def from_host_to_host(x):
    """Three arrays go to the device, one small program runs, and its result comes back."""
    arrays = np.zeros((512,), np.int32), np.zeros((1,), np.int32), np.zeros((1,), np.int32)
    return np.asarray(_of_host()(x, *jax.device_put(arrays)))


def starts() -> Iterator[tuple]:
    tiny = lambda: (jnp.ones((1024,), jnp.float32),)

    def straight(x):
        for _ in range(TINY):
            x = lax.optimization_barrier(x * 1.0001 + 1.0)
        return x

    def in_loop(x):
        def body(x, _):
            for _ in range(IN_LOOP):
                x = lax.optimization_barrier(x * 1.0001 + 1.0)
            return x, None

        return lax.scan(body, x, None, length=ROUNDS)[0]

    yield "starts", {"what": "from host to host", "kernels": 1}, from_host_to_host, tiny, 1, 200.0
    yield "starts", {"what": "straight", "kernels": TINY}, straight, tiny, TINY, 2.0
    row = {"what": "loop", "kernels": IN_LOOP, "rounds": ROUNDS}
    yield "starts", row, in_loop, tiny, IN_LOOP * ROUNDS, 2.0


def mixed(small: Callable[[float], bool]) -> Iterator[tuple]:
    if not small(2.0 * MIXED**3):
        return
    nbytes = 4 * MIXED_VALUES

    def run(of: int) -> Callable:
        def program(x, w, z):
            found = []
            for _ in range(4):
                (x, z), y = after((x, z), x @ w)
                found.append(y)
                for _ in range(of):
                    x, z = lax.optimization_barrier((x, z * jnp.bfloat16(0.99) + jnp.bfloat16(0.01)))
            return found, z

        return program

    key = jax.random.key(0)
    draw = lambda shape: jax.random.normal(key, shape, jnp.bfloat16)
    operands = lambda: (draw((MIXED, MIXED)), draw((MIXED, MIXED)), draw((MIXED_VALUES,)))
    for of in MIXED_PASSES:
        guess = 2e6 * MIXED**3 / 700e12 + of * nbytes / 4e6
        yield "mixed", {"m": MIXED, "passes": of, "bytes": of * nbytes}, run(of), operands, 4, guess


def passes(small: Callable[[float], bool]) -> Iterator[tuple]:
    for kind, rows, columns in PASSES:
        size = 4 if kind == "adamw" else 2
        arrays = {"elementwise": 2, "norm": 2, "sum": 1, "adamw": 7}[kind]
        nbytes = arrays * size * rows * columns
        if not small(100 * nbytes):
            continue
        guess = 4 + nbytes / 3.5e6
        calls = fitting(guess, 4 * nbytes)
        row = {"what": kind, "rows": rows, "columns": columns, "bytes": nbytes}
        yield "passes", row, PASS[kind](calls), _drawn(kind, calls, rows, columns), calls, guess


def _drawn(kind: str, calls: int, rows: int, columns: int) -> Callable[[], tuple]:
    dtype = jnp.float32 if kind == "adamw" else jnp.bfloat16
    key = jax.random.key(0)
    if kind == "adamw":
        return lambda: tuple(jnp.full((calls, rows, columns), 1e-3 * (i + 1), dtype) for i in range(4))
    return lambda: (jax.random.normal(key, (rows, columns), dtype),)


def _elementwise(calls: int) -> Callable:
    def run(x):
        for _ in range(calls):
            x = lax.optimization_barrier(x * jnp.bfloat16(0.99) + jnp.bfloat16(0.01))
        return x

    return run


def _norm(calls: int) -> Callable:
    def run(x):
        for _ in range(calls):
            wide = x.astype(jnp.float32)
            scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
            x = lax.optimization_barrier((wide * scale).astype(x.dtype))
        return x

    return run


def _sum(calls: int) -> Callable:
    def run(x):
        sums = []
        for _ in range(calls):
            x, y = after(x, jnp.sum(x, axis=0, dtype=jnp.float32))
            sums.append(y)
        return sums

    return run


def _adamw(calls: int) -> Callable:
    def run(gradient, weight, first, second):
        found = []
        for i in range(calls):
            g, w, m, v = (a[i] for a in (gradient, weight, first, second))
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            gradient, new = after(gradient, (w - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w), m, v))
            found.append(new)
        return found

    return run


PASS = {"elementwise": _elementwise, "norm": _norm, "sum": _sum, "adamw": _adamw}


def products(small: Callable[[float], bool]) -> Iterator[tuple]:
    for form, m, n, k in PRODUCTS:
        if not small(2.0 * m * n * k):
            continue
        out = 4 if form == "dw" else 2
        nbytes = 2 * (m * k + k * n) + out * m * n
        guess = 4 + 2e6 * m * n * k / 650e12 + nbytes / 3.5e6
        calls = fitting(guess, 2 * k * n + out * m * n)
        yield "products", {"form": form, "m": m, "n": n, "k": k}, *_product(form, m, n, k, calls=calls), calls, guess


def _product(form: str, m: int, n: int, k: int, *, calls: int) -> tuple[Callable, Callable]:
    left = (k, m) if form == "dw" else (m, k)
    right = (n, k) if form == "dx" else (k, n)
    contract = (((0 if form == "dw" else 1,), (1 if form == "dx" else 0,)), ((), ()))
    dtype = jnp.float32 if form == "dw" else jnp.bfloat16

    def run(x, *weights):
        found = []
        for w in weights:
            x, y = after(x, lax.dot_general(x, w, contract, preferred_element_type=dtype))
            found.append(y)
        return found

    def operands() -> tuple:
        draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
        keys = jax.random.split(jax.random.key(0), calls + 1)
        # Small ones each have weights of their own, as layers do; of large ones one is drawn.
        of = [draw(key, right) for key in keys[1:]] if right[0] * right[1] < 1 << 26 else [draw(keys[1], right)] * calls
        return draw(keys[0], left), *of

    return run, operands


def attention(small: Callable[[float], bool]) -> Iterator[tuple]:
    for sequences, length, heads, kv, width in ATTENTION:
        pairs = sequences * heads * length * length / 2
        if not small(4 * pairs * width):
            continue
        shape = {"sequences": sequences, "length": length, "heads": heads, "kv_heads": kv, "width": width}
        for what, flops in (("forward", 4), ("backward", 14)):
            guess = 6 + 1e6 * flops * pairs * width / 350e12
            calls = fitting(guess, 16 * sequences * length * heads * width)
            row = {"what": what} | shape
            operands = _heads(sequences, length, heads, kv=kv, width=width)
            yield "attention", row, _attention(what, calls), operands, calls, guess


def _heads(sequences: int, length: int, heads: int, *, kv: int, width: int) -> Callable[[], tuple]:
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, n: jax.random.normal(key, (sequences, length, n, width), jnp.bfloat16)
    return lambda: (draw(keys[0], heads), draw(keys[1], kv), draw(keys[2], kv))


def _attention(what: str, calls: int) -> Callable:
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    def both(q, k, v):
        y, back = jax.vjp(attend, q, k, v)
        return back(y)

    def run(q, k, v):
        found = []
        for _ in range(calls):
            q, y = after(q, (attend if what == "forward" else both)(q, k, v))
            found.append(y)
        return found

    return run


def write(args, results: dict) -> None:
    lines = [
        *runs.header("Kernels alone: products, attention, passes over memory, starts", args.commit),
        f"Microseconds of a kernel with its start, medians of {REPEATS} rounds of queued programs, random values.", "",
        "| products | m | n | k | us | TFLOP/s |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in results["products"]:
        rate = 2e-6 * r["m"] * r["n"] * r["k"] / r["us"]
        lines.append(f"| {r['form']} | {r['m']:,} | {r['n']:,} | {r['k']:,} | {r['us']:.1f} | {rate:.0f} |")
    lines += ["", "| mixed: a product of a side, and passes | side | passes | us |", "|---|---|---|---|"]
    lines += [f"| {r['bytes'] / 1e9:.2f} GB | {r['m']:,} | {r['passes']} | {r['us']:.1f} |" for r in results["mixed"]]
    lines += ["", "| attention | sequences x tokens | heads | kv heads | width | us |", "|---|---|---|---|---|---|"]
    for r in results["attention"]:
        shape = f"{r['sequences']} x {r['length']:,} | {r['heads']} | {r['kv_heads']} | {r['width']}"
        lines.append(f"| {r['what']} | {shape} | {r['us']:.1f} |")
    lines += ["", "| pass | rows x columns | us | GB/s |", "|---|---|---|---|"]
    for r in results["passes"]:
        rate = r["bytes"] / r["us"] / 1e3
        lines.append(f"| {r['what']} | {r['rows']:,} x {r['columns']:,} | {r['us']:.2f} | {rate:.0f} |")
    lines += ["", "| starts | kernels | us |", "|---|---|---|"]
    for r in results["starts"]:
        lines.append(f"| {r['what']} | {r['kernels']}{' x ' + str(r['rounds']) if 'rounds' in r else ''} | "
                     f"{r['us']:.2f} |")  # fmt: skip
    (args.out / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(cli.run(main))
