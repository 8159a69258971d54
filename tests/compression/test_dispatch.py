"""Which implementation runs, and that a kernel package in its place gets and gives what the interface says.

The package here is the jnp codec behind the kernels' five functions, so every value must be the jnp path's.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from shards import per_rank

import taco_jax
from pallas_kernels import Format, Geometry, KernelUnavailableError
from pallas_kernels import dispatch as kernel_dispatch
from pallas_kernels.dispatch import region_device
from taco_jax import CODECS, Codec
from taco_jax.codec import as_codec, stochastic_rounding
from taco_jax.compat import varying_axes
from taco_jax.compression import dispatch

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB", compute_capability="8.0")


class Package:
    """A kernel package that runs jnp for the one codec that it expects, and notes what it was asked."""

    def __init__(self, codec: Codec, into: bool = False):
        self.codec, self.asked = codec, []
        if into:
            self.decode_into = self._decode_into

    def note(self, name, fmt, geometry):
        self.asked.append((name, geometry))
        # What only decodes is one kernel for both roundings.
        rounding = self.codec.rounding if name in ("encode", "reduce_encode") else "nearest"
        expected = dataclasses.replace(self.codec, rounding=rounding)
        assert type(fmt) is Format and dataclasses.asdict(fmt) | {"token": 0} == dataclasses.asdict(expected)
        return expected

    def encode(self, fmt, geometry, x, exponent, seed):
        codec = self.note("encode", fmt, geometry)
        assert x.shape == (geometry.elements,) and (seed is None) == (fmt.rounding == "nearest")
        assert exponent is None or exponent.dtype == jnp.int32
        return self._encode(codec, codec.to_blocks(dispatch._messages(x, geometry)), exponent, seed)

    def _encode(self, codec, z, exponent, seed):
        if seed is None:
            return codec.encode_blocks(z, exponent=exponent)
        assert seed.shape == (2,) and seed.dtype == jnp.uint32
        old, stochastic_rounding.seed_of = stochastic_rounding.seed_of, lambda key: key
        try:
            return codec.encode_blocks(z, exponent=exponent, key=seed)
        finally:
            stochastic_rounding.seed_of = old

    def _sum(self, codec, geometry, wires, x, rank, exponent):
        assert wires.shape == (geometry.messages, codec.wire_bytes(geometry.per_message))
        assert rank.shape == () and rank.dtype == jnp.int32
        return dispatch._sum_blocks(codec, wires, dispatch._own(x, geometry, rank), rank, exponent)

    def reduce_encode(self, fmt, geometry, wires, x, rank, exponent, seed):
        codec = self.note("reduce_encode", fmt, geometry)
        return self._encode(codec, self._sum(codec, geometry, wires, x, rank, exponent), exponent, seed)

    def reduce_decode(self, fmt, geometry, wires, x, rank, exponent):
        codec = self.note("reduce_decode", fmt, geometry)
        assert fmt.rounding == "nearest"  # nothing is rounded to codes
        return codec.from_blocks(self._sum(codec, geometry, wires, x, rank, exponent), geometry.per_message, x.dtype)

    def sum_decode(self, fmt, wires, n, dtype, exponent):
        codec = self.note("sum_decode", fmt, n)
        return dispatch.sum_decode(codec, wires, n, dtype, exponent, backend="jnp")

    def decode(self, fmt, geometry, wires, dtype, exponent):
        codec = self.note("decode", fmt, geometry)
        assert geometry.is_whole and fmt.rounding == "nearest"
        return dispatch.decode(codec, geometry, wires, dtype, exponent, backend="jnp")

    def _decode_into(self, fmt, geometry, wires, into, exponent):
        codec = self.note("decode_into", fmt, geometry)
        p, n = geometry.messages, geometry.per_message
        rows = dispatch.decode(codec, Geometry(p * n, p, n), wires, into.dtype, exponent, backend="jnp").reshape(p, n)
        for i, row in enumerate(rows):
            start = geometry.offset + i * geometry.distance
            into = into.at[start : start + n].set(row[: max(0, geometry.elements - start)], mode="drop")
        return into


@pytest.fixture
def package(monkeypatch):
    """package(codec, into=False): a kernel package that runs everything from now on, unless jnp is forced."""

    def install(codec, into=False):
        made = Package(as_codec(codec), into)
        monkeypatch.setattr(dispatch, "choose_kernel", lambda spec, device, force: (force or "mosaic", "a test"))
        monkeypatch.setattr(dispatch, "load_kernels", lambda name: made)
        return made

    return install


def run(name, x_P, ranks=4, **options):
    kinds = {
        "psum": lambda x, **kw: spelled_out.psum(x, "tp", **kw),
        "one_shot": lambda x, **kw: spelled_out.psum(x, "tp", algorithm="one_shot", **kw),
        "psum_scatter": lambda x, **kw: spelled_out.psum_scatter(x, "tp", tiled=True, **kw),
        "all_gather": lambda x, **kw: spelled_out.all_gather(x, "tp", tiled=True, **kw),
        "all_gather_invarying": lambda x, **kw: spelled_out.all_gather(x, "tp", tiled=True, to="invarying", **kw),
        "all_to_all": lambda x, **kw: spelled_out.all_to_all(x, "tp", 0, 1, tiled=True, **kw),
        "ppermute": lambda x, **kw: spelled_out.ppermute(x, "tp", [(0, 1), (1, 2)], **kw),
    }
    f = functools.partial(kinds[name], **options)
    return np.asarray(per_rank(f, ranks, invarying_out=name in ("psum", "one_shot", "all_gather_invarying"))(x_P))


NAMES = ("psum", "one_shot", "psum_scatter", "all_gather", "all_gather_invarying", "all_to_all", "ppermute")
CALLS = {
    "psum": ["encode", "reduce_encode", "decode"], "one_shot": ["encode", "sum_decode"],
    "psum_scatter": ["encode", "reduce_decode"],
}  # fmt: skip


def often(choices: dict) -> list:
    """(name, choice) of every name: those in `choices` for every change, the others every night."""
    values = list(dict.fromkeys(value for values in choices.values() for value in values))
    return [
        pytest.param(name, value, marks=[] if value in choices[name] else [pytest.mark.slow])
        for name in NAMES
        for value in values
    ]


# Seeds go to whatever encodes, by the same way from all collectives; an all-reduce has another for its second encoding.
ROUNDINGS = dict.fromkeys(NAMES, ("nearest",)) | dict.fromkeys(("psum", "all_to_all"), ("stochastic",))


@pytest.mark.parametrize("name,rounding", often(ROUNDINGS))
def test_kernels_in_jnps_place(name, rounding, package):
    x_P = np.random.default_rng(0).normal(size=(4, 8, 133)).astype(np.float32)
    codec = dataclasses.replace(CODECS["taco"], rounding=rounding)
    key = jax.random.key(0) if rounding == "stochastic" else None
    scales = taco_jax.SiteScales(np.array([-7, 3], np.int32))
    expected = run(name, x_P, codec=codec, key=key, scales=scales)
    kernels = package(codec)
    np.testing.assert_array_equal(run(name, x_P, codec=codec, key=key, scales=scales), expected)
    assert [call for call, _ in kernels.asked] == CALLS.get(name, ["encode", "decode"])
    assert not kernels.asked.clear() and (run(name, x_P, codec=codec, key=key, backend="jnp") != 0).any()
    assert kernels.asked == []


INTO = dict.fromkeys(NAMES, (True,)) | dict.fromkeys(("one_shot", "psum_scatter", "all_to_all"), (False,))


@pytest.mark.parametrize("name,into", often(INTO))
def test_kernels_get_chunks_of_the_whole_x(name, into, package):
    x_P = np.random.default_rng(0).normal(size=(4, 8, 533)).astype(np.float32)
    expected = run(name, x_P, codec="mxfp8")
    kernels = package("mxfp8", into)
    np.testing.assert_array_equal(run(name, x_P, codec="mxfp8", chunks=3), expected)
    geometries = [g for call, g in kernels.asked if call == "encode"]
    assert len(geometries) == 3 and [g.elements for g in geometries] == [8 * 533] * 3
    assert [g.offset for g in geometries] == [0, geometries[0].per_message, 2 * geometries[0].per_message]
    decodes = [call for call, _ in kernels.asked if call.startswith("decode")]
    assert decodes == (["decode_into" if into else "decode"] * 3 if name not in ("one_shot", "psum_scatter") else [])


def test_kernels_take_x_as_it_is(package):
    """No padding and no slice of x: only wires and the result are cut or joined."""
    kernels = package("int8h")
    per_rank(lambda x: taco_jax.psum(x, "tp", compression="int8h"), 4, invarying_out=True).lower(
        np.zeros((4, 1000), np.float32)
    )
    assert {geometry for _, geometry in kernels.asked} == {Geometry(1000, 4, 256)}


def test_results_of_kernels_vary_like_their_inputs(package, monkeypatch):
    """A kernel's output is typed as the same on every device, and so would be its gradient."""
    kernels = package("int8h")
    monkeypatch.setattr(
        kernels, "encode", lambda fmt, g, x, exponent, seed: (jnp.zeros((4, 1024), jnp.uint8), jnp.zeros(()))
    )
    monkeypatch.setattr(
        kernels,
        "reduce_encode",
        lambda fmt, g, w, x, rank, exponent, seed: (jnp.zeros((1024,), jnp.uint8), jnp.zeros(())),
    )
    monkeypatch.setattr(kernels, "reduce_decode", lambda fmt, g, w, x, rank, exponent: jnp.zeros((8,), x.dtype))
    types = {}

    def f(x):
        geometry, rank = Geometry(32, 4, 8), jax.lax.axis_index("tp")
        codec = CODECS["int8h"]
        wires, measure = dispatch.encode(codec, geometry, x, 3)
        wire, second = dispatch.reduce_encode(codec, geometry, wires, x, rank)
        y = dispatch.reduce_decode(codec, geometry, wires, x, rank)
        types.update({k: varying_axes(v) for k, v in locals().items() if isinstance(v, jax.Array)})
        gathered = jax.lax.all_gather(wire, "tp", to="invarying")
        types["decoded"] = varying_axes(dispatch.decode(codec, geometry, gathered, x.dtype))
        return y

    per_rank(f, 4).lower(np.zeros((4, 32), np.float32))
    for name in ("wires", "measure", "wire", "second", "y"):
        assert types[name] == {"tp"}, name
    assert types["decoded"] == frozenset()


def test_statistics_are_jnps(package):
    kernels = package("taco")
    x_P, slots = np.ones((2, 300), np.float32), np.zeros((2, 2, 6), np.float32)

    def f(x, slot):
        loss = lambda slot: jnp.sum(taco_jax.psum_scatter(jnp.tile(x, 2), "tp", tiled=True, compression="taco",
                                                          scales=taco_jax.SiteScales(None, slot)))  # fmt: skip
        return jax.grad(loss)(slot)

    measured = np.asarray(per_rank(f, 2)(x_P, slots))
    assert (measured[:, 0, 5] == 2 * 384).all()  # elements, blocks padded
    assert {call for call, _ in kernels.asked} <= {"reduce_decode", "decode"}


def test_the_region_says_which_device(monkeypatch):
    seen = []
    body = lambda x: (seen.append(region_device()), x)[1]
    per_rank(body, 2).lower(np.zeros((2, 4), np.float32))
    assert seen.pop() in jax.devices()  # one of this machine, which says more than the mesh's abstract device
    assert region_device() == jax.local_devices()[0]
    mesh = AbstractMesh((4,), ("tp",), (AxisType.Auto,), abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")), jnp.zeros((4, 4)))
    assert seen.pop() == H100
    asked = []
    monkeypatch.setattr(
        dispatch, "choose_kernel", lambda spec, device, force: asked.append((spec, device)) or ("jnp", "")
    )
    f = lambda x: spelled_out.psum(x, "tp", codec="int6h")
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P()), jnp.zeros((4, 1024), jnp.bfloat16))
    assert {device for _, device in asked} == {H100}
    assert [(s.operation, s.elements, s.dtype) for s, _ in asked] == [
        ("encode", 1024, "bfloat16"), ("reduce", 256, "bfloat16"), ("decode", 1024, "bfloat16"),
    ]  # fmt: skip
    assert asked[0][0].geometry == asked[2][0].geometry == Geometry(1024, 4, 256)


def test_a_forced_backend_that_cannot_run_raises_when_traced():
    x_P = np.ones((2, 16), np.float32)
    for force in ("mosaic", "triton"):
        with pytest.raises(KernelUnavailableError, match=f"backend '{force}' cannot encode codec 'taco' on cpu"):
            run("psum", x_P, ranks=2, codec="taco", backend=force)
    run("psum", x_P, ranks=2, codec="none", backend="mosaic")  # nothing to encode
    with pytest.raises(KernelUnavailableError):
        dispatch.check_backend("taco", SimpleNamespace(platform="cpu", device_kind="cpu"), "bfloat16", "triton")
    dispatch.check_backend("taco", jax.devices()[0], "bfloat16", "auto")


def test_layers_force_a_backend_too():
    compression = taco_jax.Compression("taco", backend="mosaic", min_bytes=0)
    with pytest.raises(KernelUnavailableError, match="CPU has no kernels"):
        f = lambda x: taco_jax.tensor_parallel.reduce_from_tp(x, "tp", compression)
        per_rank(f, 2, invarying_out=True)(np.ones((2, 16), np.float32))


@pytest.mark.parametrize("changes", [{"element": "e2m2"}, {"scale": "e4m0"}, {"block": 8}, {"block": 16}])
@pytest.mark.parametrize("device", [H100, A100])
def test_kernels_refuse_what_they_lack(changes, device, monkeypatch):
    """In one line each, forced or not, for codecs of arXiv 2411.09510's fields."""
    monkeypatch.setattr(kernel_dispatch, "_triton_missing", lambda: None)
    codec = dataclasses.replace(CODECS["mxfp4"], **changes)
    for operation in ("encode", "reduce", "decode"):
        name, reason = dispatch.choose(codec, device, "bfloat16", operation=operation)
        (value,) = changes.values()
        assert name == "jnp" and str(value) in reason and "\n" not in reason
        with pytest.raises(KernelUnavailableError, match=f"cannot {operation} codec .*{value}"):
            forced = "mosaic" if device is H100 else "triton"
            dispatch.choose(codec, device, "bfloat16", operation=operation, backend=forced)


def test_formats_are_codecs():
    for name, codec in CODECS.items():
        if codec.exact or dispatch.without_format(codec):
            continue
        fmt = dispatch.to_format(codec)
        assert fmt.wire_bytes(1000) == codec.wire_bytes(1000), name
