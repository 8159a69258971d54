"""experiments/bench_dropin.py: what it counts in traces and compiled programs, and a run on emulated devices."""

import functools
import importlib
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax import Compression
from taco_jax.config import cli

ALL_REDUCE, GEMM, ENCODE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "nvjet_hsh_128x256", "encode_tiles_mosaic_gpu_k"
SIZES = {
    "layers": 3, "width": 128, "hidden": 256, "heads": 8, "kv-heads": 8, "head-dim": 16, "vocabulary": 512,
    "tokens": 128, "sequence": 64,
}  # fmt: skip


@pytest.fixture
def program(monkeypatch, repository):
    monkeypatch.syspath_prepend(repository / "experiments")
    monkeypatch.chdir(repository)
    return importlib.import_module


def trace(*planes):
    """A profile of planes {line: [(kernel, start, end in us)]}."""
    text, names = [], sorted({name for _, lines in planes for line in lines.values() for name, _, _ in line})
    for plane, lines in planes:
        body = [f'name: "{plane}"']
        for name, events in lines.items():
            shown = " ".join(
                f"events {{ metadata_id: {names.index(n) + 1} offset_ps: {a * 10**6} duration_ps: {(b - a) * 10**6} }}"
                for n, a, b in events
            )
            body.append(f'lines {{ name: "{name}" timestamp_ns: 1000 {shown} }}')
        body += [f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{n}" }} }}' for i, n in enumerate(names)]
        text.append(f"planes {{ {' '.join(body)} }}")
    return jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace("\n".join(text))
    )


def test_where_the_time_of_kernels_goes(program):
    kernel_times = program("kernel_times")
    streams = {
        "Stream #1(Compute)": [(GEMM, 0, 40), (ENCODE, 40, 50), (GEMM, 70, 100)],
        "Stream #2(Compute)": [(ALL_REDUCE, 30, 60)],
        "XLA Ops": [("fusion", 0, 100)],
    }
    late = {name: [(kernel, a + 500, b + 500) for kernel, a, b in events] for name, events in streams.items()}
    profile = trace(("/device:GPU:0", streams), ("/device:GPU:1", late), ("/host:CPU", {"Stream": [("x", 0, 9000)]}))
    found = kernel_times.times(kernel_times.events(profile), steps=2)
    ms = lambda us: pytest.approx(us / 2000)
    assert found.window == ms(100) and found.idle == ms(10)
    # The sum runs beside a product and a codec for 20 us, then alone.
    assert found.messages_alone == ms(10) and found.messages_hidden == ms(20)
    assert found.kinds["matrix product"] == (ms(70), ms(60))
    assert found.kinds["all-reduce"] == (ms(30), ms(10)) and found.kinds["codec"] == (ms(10), ms(0))
    assert found.kernels[GEMM] == (1, ms(70)) and list(found.kernels) == [GEMM, ALL_REDUCE, ENCODE]
    shown = "\n".join(kernel_times.table({"none": found, "int8h": None}))
    assert f"| `{ALL_REDUCE}` | 0.5 | {30 / 2000:.2f} | all-reduce |" in shown and "int8h" not in shown


@pytest.mark.parametrize(
    "name,kind",
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send and receive"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce-scatter"),
        ("ncclDevKernel_Generic_1", "other NCCL"),
        ("nvlink_all_reduce_mosaic_gpu_kernel", "sum in one NVLink kernel"),
        ("reduce_tiles_mosaic_gpu_kernel", "codec"),
        ("gemm_fusion_dot_3", "matrix product"),
        ("MemcpyD2D", "copy"),
        ("loop_transpose_fusion", "copy"),
        ("loop_multiply_fusion_2", "other"),
    ],
)
def test_kinds_of_kernels(name, kind, program):
    assert program("kernel_times").kind(name) == kind


def test_a_trace_without_gpus(program):
    kernel_times = program("kernel_times")
    times = kernel_times.traced(lambda: jax.block_until_ready(jnp.ones(8) + 1), steps=1)
    assert times is None
    assert kernel_times.table({"none": times}) == ["No GPU has run a kernel while it was traced."]


def test_collectives_count_as_often_as_their_loops_run(program):
    hlo_collectives = program("hlo_collectives")
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    put = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*([None] * (len(shape) - 2)), "tensor", None)))  # fmt: skip  # noqa: E501
    whole = NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=whole)
    def f(ws, last):
        inner = lambda x, w: (jax.lax.with_sharding_constraint(x @ w, whole), None)
        outer = lambda x, w: jax.lax.scan(inner, x, w)
        x, _ = jax.lax.scan(outer, jnp.ones((64, 64)), ws)
        return jax.lax.with_sharding_constraint(x @ last, whole)

    found = hlo_collectives.collectives(f.lower(put(3, 5, 64, 64), put(64, 64)).compile().as_text())
    sums = sorted((c.runs, c.count, c.elements, c.nbytes) for c in found if c.operation == "all-reduce")
    assert sums == [(1, 1, 4096, 16384), (15, 1, 4096, 16384)]
    assert "16 all-reduce" in hlo_collectives.counts(found) and hlo_collectives.counts(found, 10**6) == "none"
    assert any(
        "| all-reduce | f32[64,64] | no | 1 | 15 | `jit(f)/while" in line for line in hlo_collectives.table(found)
    )


STARTED = """HloModule m

%wrapped (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %a = bf16[8,4]{1,0} all-to-all(%p), channel_id=2, dimensions={0}
}

ENTRY %main (x: bf16[8,4]) -> bf16[16,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %s = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) async-start(%x), calls=%wrapped
  %d = bf16[8,4]{1,0} async-done(%s)
  %g = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%d), channel_id=3, dimensions={0}
  %e = bf16[16,4]{1,0} all-gather-done(%g)
  %r = ((bf16[16,4]{1,0}), bf16[16,4]{1,0}) all-reduce-start(%e), channel_id=4, to_apply=%add
  ROOT %f = bf16[16,4]{1,0} all-reduce-done(%r)
}
"""


def test_asynchronous_collectives(program):
    found = program("hlo_collectives").collectives(STARTED)
    assert [(c.operation, c.shapes, c.asynchronous, c.nbytes) for c in found] == [
        ("all-gather", "bf16[16,4]", True, 128),
        ("all-reduce", "bf16[16,4]", True, 128),
        ("all-to-all", "bf16[8,4]", True, 64),
    ]


def test_variants(program):
    assert program("bench_dropin").parse("none,int8h,int4h:nccl:2") == {
        "none": None, "int8h": Compression("int8h"), "int4h:nccl:2": Compression("int4h", link="nccl", chunks=2),
    }  # fmt: skip


@pytest.mark.slow
def test_the_stack_on_emulated_devices(program, tmp_path, capsys):
    sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    arguments = ["--out", str(tmp_path), "--variants", "none,int8h", "--rounds", "1", "--min-bytes", "0", *sizes]
    more = ["--steps-per-round", "1", "--loss-steps", "3", "--collectives", "--commit", "abc"]
    assert cli.run(program("bench_dropin").main, [*arguments, *more]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())["stack"]
    exact, ours = found["none"], found["int8h"]
    assert ours["losses"] == pytest.approx(exact["losses"], rel=0.01) and ours["losses"] != exact["losses"]
    assert exact["losses"][2] < exact["losses"][0]
    assert ours["share"] > 0.95 and ours["bytes"][1] < 0.6 * ours["bytes"][0]
    assert "6 all-reduce" in exact["collectives"] and "6 all-to-all" in ours["collectives"]
    text = (tmp_path / "README.md").read_text()
    assert "* commit: abc" in text and "### Collectives, int8h" in text and "| none |" in text
