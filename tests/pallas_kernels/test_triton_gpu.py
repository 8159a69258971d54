"""The Triton kernels on a GPU against the jnp codec on its CPU: byte for byte where the arithmetic is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from triton_checks import CODECS_WITH_KERNELS, DATA, Check, values

from pallas_kernels import Geometry
from pallas_kernels.triton import operations
from taco_jax.codec import CODECS, Codec
from taco_jax.compression import dispatch

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16", "float32")
SIZES = (1, 7, 127, 128, 129, 8191, 8193, (1 << 20) + 8)
# Each codec in one dtype, and one that has most paths in all of them; sizes share compiled kernels.
CASES = [(name, DTYPES[i % 3]) for i, name in enumerate(CODECS_WITH_KERNELS)]
CASES = list(dict.fromkeys([*CASES, *(("int6h", dtype) for dtype in DTYPES), ("taco", "bfloat16")]))


@pytest.fixture(scope="module", autouse=True)
def triton_runs():
    pytest.importorskip("jax_triton", reason="jax-triton is not installed", exc_type=ImportError)


@pytest.mark.parametrize("name,dtype", CASES)
def test_presets_equal_the_jnp_codec(name, dtype):
    for i, n in enumerate(SIZES):
        # A million elements are one aligned message; the others are one message or three and a bit.
        messages = 1 if n > 10000 or i % 2 else 4
        size = n if messages == 1 else 4 * n - n // 2 - (n == 1)
        x = values(DATA[(i + len(name)) % len(DATA)], size, dtype)
        assert Check(CODECS_WITH_KERNELS[name], Geometry(size, messages, n), x).run(jax.jit) == [], n


@pytest.mark.parametrize(
    "codec,exponent",
    [
        (Codec("e4m3", 128, "hadamard", "ue5m3", "stochastic"), -3),
        (Codec("int8", 256, "signed_hadamard", "site"), None),
        (Codec("int6", 64, "hadamard", "site", "stochastic"), -2),
        (Codec("e4m3", 256, "hadamard", "float32"), None),
        (Codec("e5m2", 64, "hadamard", "e8m0", "stochastic"), None),
        (Codec("int5", 32, "hadamard", "bfloat16"), None),
    ],
    ids=lambda value: value.name if isinstance(value, Codec) else str(value),
)
def test_other_codecs_equal_the_jnp_codec(codec, exponent):
    key = jax.random.key(1) if codec.rounding == "stochastic" else None
    x = values("nan", 40000, "bfloat16")
    assert Check(codec, Geometry(40000, 4, 10000), x, exponent, key).run(jax.jit) == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("name", ["taco", "int6h", "mxfp4"])
def test_the_tiles_and_casts_of_other_gpus_equal_the_jnp_codec(name, capability, monkeypatch):
    # What those GPUs launch, assembled for this one.
    monkeypatch.setattr(operations, "capability", lambda: capability)
    x = values("grid", 4 * 8193, "bfloat16")
    assert Check(CODECS_WITH_KERNELS[name], Geometry(x.size, 4, 8193), x).run(jax.jit) == []


@pytest.mark.parametrize("name", ["taco", "int8h", "int4h", "mxfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gaussian_data_differ_in_a_few_bytes(name, dtype):
    # Sums of a rotation in another order may round to the other side of a border.
    codec, n = CODECS[name], 1 << 20
    x = np.random.default_rng(0).standard_normal(n, np.float32).astype(jnp.dtype(dtype))
    geometry = Geometry(n, 4, n // 4)
    fmt = dispatch.to_format(codec)
    ours, largest = jax.jit(lambda x: operations.encode(fmt, geometry, x))(x)
    with jax.default_device(jax.devices("cpu")[0]):
        theirs, measure = jax.jit(lambda x: dispatch.encode(codec, geometry, x, backend="jnp"))(jnp.asarray(x))
    assert (np.asarray(ours) != np.asarray(theirs)).mean() < 1e-3
    np.testing.assert_allclose(largest, measure[0], rtol=1e-5)


def test_more_than_2_31_elements():
    row = jnp.asarray(values("grid", 4096, "bfloat16"))
    rows = 2**19 + 1
    x = jax.jit(lambda row: jnp.broadcast_to(row, (rows, 4096)).reshape(-1))(row)
    fmt, geometry = dispatch.to_format(CODECS["taco"]), Geometry(rows * 4096, 1, rows * 4096)
    wires, _ = jax.jit(lambda x: operations.encode(fmt, geometry, x))(x)
    assert jax.jit(lambda w: (w[0, : rows * 4096].reshape(rows, 4096) == w[0, :4096]).all())(wires)
    (start, length) = fmt.sections(rows * 4096)[1]
    assert jax.jit(lambda w: (w[0, start : start + length].reshape(rows, 32) == w[0, start : start + 32]).all())(wires)
    y = jax.jit(lambda w: operations.decode(fmt, geometry, w, jnp.bfloat16))(wires)
    assert jax.jit(lambda y: (y.reshape(rows, 4096) == y[:4096]).all())(y)
    np.testing.assert_allclose(np.asarray(y[:4096], np.float32), np.asarray(row, np.float32), atol=0.6)


def test_chunks_decode_in_place():
    codec, n = CODECS["int6h"], 5000
    fmt, x = dispatch.to_format(codec), jnp.asarray(values("grid", n, "bfloat16"))
    chunks = [Geometry(n, 2, 1000, 0, 2500), Geometry(n, 2, 1500, 1000, 2500)]

    @jax.jit
    def run(x):
        y = jnp.zeros_like(x)
        for chunk in chunks:
            y = operations.decode_into(fmt, chunk, operations.encode(fmt, chunk, x)[0], y)
        return y

    expected = []
    for part in np.split(np.asarray(x), [1000, 2500, 3500]):
        with jax.default_device(jax.devices("cpu")[0]):
            part = jnp.asarray(part)
            expected.append(np.asarray(codec.decode(codec.encode(part), part.shape, part.dtype)))
    assert np.array_equal(np.asarray(run(x)), np.concatenate(expected))


def test_outputs_vary_as_their_inputs_do():
    ranks = len(jax.devices())
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    fmt, geometry = dispatch.to_format(CODECS["taco"]), Geometry(4096, 1, 4096)

    def body(x):
        wires, largest = operations.encode(fmt, geometry, x)
        assert jax.typeof(wires).manual_axis_type.varying == {"tp"}
        assert jax.typeof(largest).manual_axis_type.varying == {"tp"}
        return operations.decode(fmt, geometry, wires, x.dtype)

    x = jnp.asarray(values("grid", ranks * 4096, "bfloat16"))
    y = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))(x)
    np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(x, np.float32), atol=0.6)
