"""When a message takes NVLink, what is recorded of it, and what is said where it does not; traced without a GPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import spelled_out
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from spelled_out import every_size

import taco_jax
from pallas_kernels import KernelUnavailableError
from pallas_kernels.nvlink import hardware
from taco_jax import CODECS
from taco_jax.collectives import comm_log, nvlink
from taco_jax.compression import dispatch

# Before, a warp of a kernel does not know its device's place in the mesh.
needs_jax_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="NVLink kernels need jax 0.11")
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB", compute_capability="8.0")
ROW = 128
S = 4 * 64 * ROW * 3


@pytest.fixture
def on_h100(monkeypatch):
    monkeypatch.setattr(nvlink, "region_device", lambda: H100)
    monkeypatch.setattr(hardware, "all_linked", lambda: True)


def trace(f, *shapes, ranks=4, axes=("tp",)):
    """Traces f on every rank. Returns (what was chosen, the site table)."""
    dims = (ranks,) if len(axes) == 1 else (2, 2)
    mesh = jax.make_mesh(dims, axes, axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:ranks])
    own = lambda *xs: jax.tree.map(lambda y: varying(y, axes)[None], f(*(x[0] for x in xs)))
    args = [jax.ShapeDtypeStruct((ranks, *s), jnp.bfloat16) for s in shapes]
    with dispatch.record() as choices, comm_log.record() as table:
        jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(axes), out_specs=P(axes))).trace(*args)
    return choices, table


def varying(y, axes):
    missing = tuple(a for a in axes if a not in jax.typeof(y).manual_axis_type.varying)
    return lax.pcast(y, missing, to="varying") if missing else y


@needs_jax_0_11
@pytest.mark.parametrize(
    "operation, f, hops",
    [
        ("all_reduce", lambda x, **o: spelled_out.psum(x, "tp", **o), 2),
        ("reduce_scatter", lambda x, **o: spelled_out.psum_scatter(x.reshape(4, -1), "tp", **o), 1),
        ("all_gather", lambda x, **o: spelled_out.all_gather(x[: S // 4], "tp", **o), 1),
    ],
)
@pytest.mark.parametrize("codec", ["taco", "int4h"])
def test_what_is_recorded(operation, f, hops, codec, on_h100):
    choices, table = trace(lambda x: f(x, codec=codec), (S,))
    (found,) = choices[codec, operation]
    assert found == ("nvlink", "one kernel over NVLink writes into peers' memory")
    # Only what runs: not the encoding, nor the hops, of the other way.
    assert list(choices) == [(codec, operation)]
    (row,) = table.rows()
    per_rank = CODECS[codec].bits / 8 * S * 3 / 4 * hops
    assert per_rank <= row.bytes < 1.02 * per_rank
    assert {opcode for opcode, _, _ in row.hlo} == {"custom-call"}


@needs_jax_0_11
@pytest.mark.parametrize(
    "options, device, ranks, reason",
    [
        ({"link": "nccl"}, H100, 4, None),
        ({}, A100, 4, "NVLink kernels need compute capability 9.0, not NVIDIA A100"),
        ({"backend": "jnp"}, H100, 4, "backend 'jnp' was asked for"),
        ({}, H100, 3, "nvlink kernels are for 2, 4, 8 ranks, not 3"),
        ({"size": 1000}, H100, 4, "a message of 1024 elements"),
        ({"codec": "taco_paper"}, H100, 4, "kernel"),
    ],
)
def test_why_not(options, device, ranks, reason, on_h100, monkeypatch):
    monkeypatch.setattr(nvlink, "region_device", lambda: device)
    options = dict(options)
    codec, size = options.pop("codec", "taco"), options.pop("size", S)
    choices, table = trace(lambda x: spelled_out.psum(x, "tp", codec=codec, **options), (size,), ranks=ranks)
    found = choices.get((codec, "all_reduce"), [])
    assert found == [] if reason is None else found[0][0] == "nccl" and reason in found[0][1]
    (row,) = table.rows()
    assert {opcode for opcode, _, _ in row.hlo} <= {"all-to-all", "all-gather"}
    if reason is not None:
        with pytest.raises(KernelUnavailableError, match="link 'nvlink' cannot all_reduce"):
            trace(
                lambda x: spelled_out.psum(x, "tp", codec=codec, link="nvlink", **options),
                (size,),
                ranks=ranks,
            )


def test_several_processes(on_h100, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    choices, _ = trace(lambda x: taco_jax.psum(x, "tp", compression=every_size("taco")), (S,))
    assert "several processes" in choices["taco", "all_reduce"][0][1]


@needs_jax_0_11
def test_several_axes(on_h100):
    choices, _ = trace(
        lambda x: taco_jax.psum(x, ("dp", "tp"), compression=every_size("taco")), (S,), axes=("dp", "tp")
    )
    assert "over the axes" in choices["taco", "all_reduce"][0][1]
    for axis in ("dp", "tp"):
        choices, _ = trace(
            lambda x, axis=axis: taco_jax.psum(x, axis, compression=every_size("taco")), (S,), axes=("dp", "tp")
        )
        assert choices["taco", "all_reduce"][0][0] == "nvlink"


@needs_jax_0_11
@pytest.mark.parametrize("name", ["all_to_all", "ppermute"])
def test_what_has_no_kernel(name, on_h100):
    def f(x, **options):
        if name == "ppermute":
            return spelled_out.ppermute(x, "tp", [(0, 1)], codec="taco", **options)
        return spelled_out.all_to_all(x.reshape(4, -1), "tp", 0, 0, codec="taco", **options)

    choices, _ = trace(f, (S,))
    assert ("taco", name) not in choices
    with pytest.raises(KernelUnavailableError, match=f"link 'nvlink' cannot {name}.*: there is no NVLink kernel for"):
        trace(lambda x: f(x, link="nvlink"), (S,))


@needs_jax_0_11
def test_a_gradient_is_two_messages(on_h100):
    def f(x):
        def loss(x):
            y = taco_jax.copy(lax.psum(x, "tp"), "tp", compression=every_size("taco"))
            return taco_jax.psum(y * y, "tp", compression=every_size("int8h")).astype(jnp.float32).sum()

        return jax.grad(loss)(x)

    choices, table = trace(f, (S,))
    assert choices["taco", "all_reduce"][0][0] == choices["int8h", "all_reduce"][0][0] == "nvlink"
    assert {(row.site, row.direction) for row in table.rows()} == {("psum", "forward"), ("copy", "backward")}


@needs_jax_0_11
def test_a_tail_is_summed_exactly_and_listed(on_h100):
    _, table = trace(lambda x: taco_jax.psum(x, "tp", compression=every_size("taco")), (S + 77,))
    tail, whole = sorted(table.rows(), key=lambda row: row.elements)
    assert (tail.elements, tail.dtype, tail.codec, tail.kind) == (77, "float32", "none", "other")
    assert (whole.elements, whole.codec) == (S + 77, "taco")


def test_an_older_jax(on_h100, monkeypatch):
    from pallas_kernels import compat

    monkeypatch.setattr(compat, "WARPS_KNOW_THE_MESH", False)
    choices, _ = trace(lambda x: taco_jax.psum(x, "tp", compression=every_size("taco")), (S,))
    assert "NVLink kernels need jax 0.11 or newer" in choices["taco", "all_reduce"][0][1]
