"""What the collectives refuse: other regions, other arguments, other shapes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import spelled_out
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from shards import per_rank

import taco_jax
from pallas_kernels import KernelUnavailableError


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "all_to_all"])
def test_axis_index_groups_raise(name):
    arguments = (0, 0) if name == "all_to_all" else ()
    with pytest.raises(ValueError, match=f"{name}: axis_index_groups is not supported; use a mesh with one axis"):
        per_rank(
            lambda x: getattr(taco_jax, name)(
                x, "tp", *arguments, compression="taco", axis_index_groups=[[0, 1], [2, 3]]
            ),
            4,
        )(np.ones((4, 4, 4), np.float32))


ENTRIES = {
    "psum": lambda x, **kw: spelled_out.psum(x, "tp", **kw),
    "psum_scatter": lambda x, **kw: spelled_out.psum_scatter(x, "tp", tiled=True, **kw),
    "all_gather": lambda x, **kw: spelled_out.all_gather(x, "tp", **kw),
    "all_to_all": lambda x, **kw: spelled_out.all_to_all(x, "tp", 0, 0, tiled=True, **kw),
    "ppermute": lambda x, **kw: spelled_out.ppermute(x, "tp", [(0, 1)], **kw),
    "copy": lambda x, **kw: spelled_out.copy(x, "tp", **kw),
    "psum_with_feedback": lambda x, **kw: spelled_out.psum_with_feedback(x, "tp", **kw),
}


@pytest.mark.parametrize("codec", ["taco", "none"])
@pytest.mark.parametrize("name", ENTRIES)
def test_the_wrong_kind_of_region_raises(name, codec):
    mesh = make_mesh(dp=2, tp=4)
    x = np.ones((8, 16), np.float32)

    def run(**options):
        f = functools.partial(ENTRIES[name], codec=codec)
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), **options))(x)

    with pytest.raises(ValueError, match=f"{name}: the region was made with check_vma=False"):
        run(check_vma=False)
    if name == "psum_with_feedback":  # what the others do there is in test_partly_manual.py
        with pytest.raises(ValueError, match=rf"{name}: the region is manual over \['tp'\] but not over \['dp'\]"):
            run(axis_names={"tp"})
    with pytest.raises(ValueError, match=f"{name}: axis 'tp' is not a manual mesh axis here"):
        ENTRIES[name](x, codec=codec)


def test_axes_of_size_one_need_not_be_manual():
    mesh = make_mesh(tp=4)
    f = jax.shard_map(
        lambda x: taco_jax.psum(x, "tp", compression="int8h"),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P(),
        axis_names={"tp"},
    )
    assert jax.jit(f)(np.ones((4, 16), np.float32)).shape == (1, 16)


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"codec": "tacoo"}, ValueError, r"did you mean 'taco'\?"),
        ({"codec": 8}, TypeError, "forward=8: must be a preset's name or a Codec"),
        ({"algorithm": "ring"}, ValueError, "algorithm='ring'"),
        (
            {"link": "nvlink"},
            KernelUnavailableError,
            "link 'nvlink' cannot all_reduce codec 'taco': platform 'cpu' has no NVLink kernels; use link 'auto'",
        ),
        ({"link": "ib"}, ValueError, "link='ib'"),
        ({"min_bytes": -1}, ValueError, "min_bytes=-1: must be an integer of 0 or more bytes"),
        ({"min_bytes": "1"}, TypeError, "min_bytes='1': is of type str; must be an integer of 0 or more"),
        ({"min_bytes": 1.5}, TypeError, "min_bytes=1.5: is of type float"),
        ({"min_bytes": True}, TypeError, "min_bytes=True: is of type bool"),
        ({"backend": "cuda"}, ValueError, "backend='cuda' is unknown"),
        (
            {"backend": "mosaic"},
            KernelUnavailableError,
            "backend 'mosaic' cannot encode codec 'taco' on cpu: CPU",
        ),
        ({"exchange": "rings"}, ValueError, r"exchange='rings' is unknown: did you mean 'ring'\?"),
        ({"chunks": 0}, ValueError, "chunks=0: must be an integer from 1 to 1024, or None"),
        ({"chunks": 1025}, ValueError, "chunks=1025: must be an integer from 1 to 1024"),
        ({"chunks": 2.0}, TypeError, "chunks=2.0: is of type float; must be an integer from 1"),
        ({"chunks": "2"}, TypeError, "chunks='2': is of type str"),
        ({"chunks": np.float32(2)}, TypeError, "chunks=.*float32"),
        ({"key": 5}, TypeError, r"psum: key=5: must be one key, of jax.random.key\(seed\)"),
        ({"key": np.zeros(2)}, TypeError, r"psum: key=float64\[2\]: must be one key"),
        ({"key": np.zeros((3, 2), np.uint32)}, TypeError, r"psum: key=uint32\[3, 2\]: must be one key"),
        ({"backward": "tacoo"}, ValueError, r"backward='tacoo' is unknown: did you mean 'taco'\?"),
        ({"backward": 8}, TypeError, "backward=8: must be a preset's name or a Codec"),
        (
            {"scales": taco_jax.SiteScales(None, np.zeros((2, 3), np.float32))},
            ValueError,
            r"slot is float32\[2, 3\]: ",
        ),
        (
            {"scales": taco_jax.SiteScales(None, np.zeros((2, 1)))},
            ValueError,
            r"scales.slot is float64\[2, 1\]: ",
        ),
        (
            {"scales": taco_jax.SiteScales(np.zeros(2, np.float32))},
            ValueError,
            r"is float32\[2\]: must be int32\[2\]",
        ),
        (
            {"scales": taco_jax.SiteScales(np.zeros((), np.int32))},
            ValueError,
            r"exponents is int32\[\]: must be",
        ),
        ({"scales": taco_jax.SiteScales(np.zeros(3, np.int32))}, ValueError, r"psum: scales.exponents is int32\[3\]"),
        ({"scales": taco_jax.SiteScales([0, 0])}, TypeError, r"psum: scales.exponents=\[0, 0\]: must be int32"),
        ({"scales": 3}, TypeError, r"psum: scales=3: must be taco_jax.SiteScales\(exponents, slot\), or None"),
        ({"scales": (None, None)}, TypeError, r"psum: scales=\(None, None\): must be taco_jax.SiteScales"),
        ({"axis_name": None}, TypeError, "psum: axis_name=None: must be the name of a mesh axis or a tuple of them"),
        ({"axis_name": 3}, TypeError, "psum: axis_name=3: must be the name"),
        ({"axis_name": ["tp"]}, TypeError, r"psum: axis_name=\['tp'\]: must be the name"),
        ({"axis_name": ("tp", 0)}, TypeError, r"psum: axis_name=\('tp', 0\): must be the name"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        per_rank(
            lambda x: spelled_out.psum(x, **{"axis_name": "tp", "codec": "taco", **options}), 2, invarying_out=True
        )(np.ones((2, 16), np.float32))


@pytest.mark.parametrize(
    "call,message",
    [
        (
            lambda x, **kw: spelled_out.all_gather(x, "tp", axis=1.0, **kw),
            "axis=1.0: is of type float; must be",
        ),
        (
            lambda x, **kw: spelled_out.psum_scatter(x, "tp", scatter_dimension="0", **kw),
            "scatter_dimension='0': is of",
        ),
        (lambda x, **kw: spelled_out.all_to_all(x, "tp", 0, None, **kw), "concat_axis=None: is of type NoneType"),
        (
            lambda x, **kw: spelled_out.ppermute(x, "tp", [(0.5, 1)], **kw),
            "ppermute: rank of perm=0.5: is of type float",
        ),
        (
            lambda x, **kw: spelled_out.ppermute(x, "tp", [(0, 1, 2)], **kw),
            r"perm=\[\(0, 1, 2\)\]: must be pairs",
        ),
        (lambda x, **kw: spelled_out.ppermute(x, "tp", 5, **kw), "ppermute: perm=5: must be pairs of ranks"),
        (lambda x, **kw: spelled_out.copy(x, ["tp"], **kw), r"copy: axis_name=\['tp'\]: must be"),
    ],
)
def test_dims_and_ranks_are_integers(call, message):
    for codec in ("taco", "none"):
        with pytest.raises(TypeError, match=message):
            per_rank(lambda x, codec=codec: call(x, codec=codec), 2)(np.ones((2, 2, 16), np.float32))


def test_a_batch_of_keys_is_refused():
    for keys in (jax.random.split(jax.random.key(0), 2), jax.random.split(jax.random.PRNGKey(0), 2)):
        with pytest.raises(TypeError, match=r"psum: key=.*\[2.*\]: must be one key"):
            per_rank(lambda x, keys=keys: taco_jax.psum(x, "tp", compression="taco", key=keys), 2, invarying_out=True)(
                np.ones((2, 16), np.float32)
            )


def test_numpy_integers_and_both_kinds_of_key_will_do():
    x_P = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    codec = dataclasses.replace(taco_jax.CODECS["int8h"], rounding="stochastic")
    run = lambda **kw: np.asarray(per_rank(lambda x: spelled_out.psum(x, "tp", codec=codec, **kw), 4)(x_P))
    expected = run(key=jax.random.key(3), chunks=2, min_bytes=8)
    for key in (jax.random.key(3), jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))):
        np.testing.assert_array_equal(run(key=key, chunks=np.int64(2), min_bytes=np.int32(8)), expected)
    compression = taco_jax.Compression("taco", chunks=np.int64(2), min_bytes=np.uint8(8))
    assert compression == taco_jax.Compression("taco", chunks=2, min_bytes=8) and type(compression.chunks) is int


def test_bad_shapes():
    x_P = np.ones((4, 6, 5), np.float32)
    for message, f in {
        "dim 0 has size 6: over 4 ranks": lambda x: taco_jax.psum_scatter(x, "tp", tiled=True, compression="taco"),
        r"\(tiled=False\) it must be 4": lambda x: taco_jax.psum_scatter(x, "tp", compression="taco"),
        "dim 2 is out of range for an array of 2 dims": lambda x: taco_jax.all_gather(
            x, "tp", axis=2, tiled=True, compression="taco"
        ),
        "dim 1 has size 5": lambda x: taco_jax.all_to_all(x, "tp", 1, 0, tiled=True, compression="taco"),
    }.items():
        with pytest.raises(ValueError, match=message):
            per_rank(f, 4)(x_P)
    with pytest.raises(ValueError, match="to='both'"):
        per_rank(lambda x: taco_jax.all_gather(x, "tp", compression="taco", to="both"), 4)(x_P)
