"""Error feedback: what each compressed sum lost reaches the next one."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import spelled_out
from helpers import make_mesh
from hlo import collectives
from jax import lax
from jax.sharding import PartitionSpec as P
from reference_codec import snr_db
from shards import bits_of_every_device, per_rank

import taco_jax
from taco_jax import Compression
from taco_jax.collectives import comm_log, to_varying

SLOW = pytest.mark.slow
CASES = [
    # (ranks, codec, options): both algorithms, rotated and not, symmetric and not, blocks of tokens, tiles, chunks
    (2, "int4h", {}),
    (3, "mxfp4", {}),
    (4, "int8_token", {"algorithm": "one_shot"}),
    pytest.param(4, "tah4", {}, marks=SLOW),
    (4, "int4h", {"exchange": "ring", "chunks": 2}),
    pytest.param(4, "mxfp4", {"algorithm": "one_shot", "chunks": 3}, marks=SLOW),
    pytest.param(4, "taco", {}, marks=SLOW),
    pytest.param(4, "int4h", {"algorithm": "two_shot", "chunks": 2}, marks=SLOW),
    pytest.param(8, "int6h", {"exchange": "ring"}, marks=SLOW),
]


def terms(ranks, dtype=np.float32, shape=(6, 136)):
    rng = np.random.default_rng(ranks)
    return (rng.normal(size=(ranks, *shape)) * np.exp2(rng.integers(-3, 4, (ranks, shape[0], 1)))).astype(dtype)


@functools.cache
def fed_back(ranks, **options):
    """(sum, own error) of every rank, of terms and the errors that came before."""

    def f(x, e):
        y, error = spelled_out.psum_with_feedback(x, "tp", e, **options)
        return to_varying(y, "tp"), error

    return per_rank(f, ranks)


@pytest.mark.parametrize("ranks,codec,options", CASES)
def test_sum_and_errors_are_what_went_in(ranks, codec, options):
    """sum of y and all ranks' errors = sum of all terms and earlier errors; y is psum's own, bit for bit."""
    x_P, e_P = terms(ranks), terms(ranks)[::-1] / 32
    f = fed_back(ranks, codec=codec, **options)
    y_P, error_P = (np.asarray(a, np.float64) for a in f(x_P, e_P))
    u_P = x_P + e_P
    plain = per_rank(lambda u: spelled_out.psum(u, "tp", codec=codec, **options), ranks, invarying_out=True)(u_P)
    for y in y_P:
        np.testing.assert_array_equal(y, np.asarray(plain))
    wanted = u_P.astype(np.float64).sum(0)
    lost = np.abs(wanted - y_P[0]).max()
    assert lost > 1e-3  # so there is something to find
    np.testing.assert_allclose(y_P[0] + error_P.sum(0), wanted, atol=1e-5 * np.abs(u_P).max())


def test_bytes_and_rows_are_those_of_psum():
    x_P = terms(4)
    plain = lambda x, e: taco_jax.psum(x + e, "tp", compression="int4h", site="here")
    found = []
    for f in (fed_back.__wrapped__(4, codec="int4h", site="here"), per_rank(plain, 4, invarying_out=True)):
        with comm_log.record() as table:
            compiled = f.lower(x_P, x_P).compile()
        found.append((collectives(compiled), table.rows()))
    assert found[0] == found[1]
    assert len(found[0][0]) == 2 and len(found[0][1]) == 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, pytest.param(np.float16, marks=SLOW)])
def test_small_types_round_the_error_once(dtype):
    x_P = terms(4, dtype)
    y_P, error_P = fed_back(4, codec="int4h")(x_P, np.zeros_like(x_P))
    assert y_P.dtype == error_P.dtype == dtype
    total = np.asarray(y_P[0], np.float64) + np.asarray(error_P, np.float64).sum(0)
    wanted = x_P.astype(np.float64).sum(0)
    # 4-bit errors, each rounded to 8 or 11 bits: far less than what was lost.
    assert snr_db(wanted, total) > snr_db(wanted, np.asarray(y_P[0], np.float64)) + 25


@pytest.mark.parametrize("options", [{"codec": "none"}, {"codec": "int4h", "min_bytes": 1 << 20}])
def test_an_exact_message_delivers_the_error_and_leaves_none(options):
    x_P, e_P = terms(4), terms(4)[::-1]
    y_P, error_P = fed_back(4, **options)(x_P, e_P)
    np.testing.assert_allclose(np.asarray(y_P[2]), (x_P + e_P).sum(0), rtol=1e-5, atol=1e-5)
    assert not np.asarray(error_P).any()


def test_one_rank_loses_nothing():
    x_P = terms(1)
    y_P, error_P = fed_back(1, codec="int4h")(x_P, x_P)
    np.testing.assert_array_equal(np.asarray(y_P), 2 * x_P)
    assert not np.asarray(error_P).any()


def depth(x_NP, codec, feedback):
    """The stream after N sums, in a scan, as a decoder's layers add to it."""

    def f(x_N):
        def layer(carry, x):
            stream, error = carry
            if feedback:
                y, error = taco_jax.psum_with_feedback(x, "tp", error, compression=codec)
            else:
                y = taco_jax.psum(x, "tp", compression=codec)
            return (stream + y, error), None

        zeros = jnp.zeros(x_N.shape[1:], x_N.dtype)
        return lax.scan(layer, (zeros, to_varying(zeros, "tp")), x_N)[0][0]

    return np.asarray(per_rank(f, x_NP.shape[0], invarying_out=True)(x_NP))


def test_errors_do_not_pile_up_along_depth():
    """16 sums: without feedback the stream's error is sixteen sums' errors, with it the last one's."""
    x_PN = np.random.default_rng(0).normal(size=(4, 16, 8, 128)).astype(np.float32)
    wanted = x_PN.astype(np.float64).sum((0, 1))
    without, fed = (np.linalg.norm(depth(x_PN, "int4h", feedback) - wanted) for feedback in (False, True))
    one = np.linalg.norm(depth(x_PN[:, -1:], "int4h", False) - x_PN[:, -1].astype(np.float64).sum(0))
    assert without > 3.3 * one  # sqrt(16) = 4 where errors are independent
    assert fed < 1.2 * one


@pytest.mark.slow
def test_the_gradient_is_that_of_psum():
    """Of both, under remat in a scan: the errors have no gradient and are not sent again."""
    x_P, w_P = terms(4), terms(4, shape=(3, 136))

    def gradients(feedback):
        def local(x, w):
            def layer(carry, w):
                x, error = carry
                if feedback:
                    y, error = taco_jax.psum_with_feedback(jnp.sin(x) * w, "tp", error, compression="int4h")
                else:
                    y = taco_jax.psum(lax.stop_gradient(error) + jnp.sin(x) * w, "tp", compression="int4h")
                return (x + y, error), None

            def loss(x, w):
                carry = lax.psum(x, "tp"), jnp.zeros_like(x)
                return jnp.square(lax.scan(jax.checkpoint(layer), carry, w)[0][0]).sum()

            return jax.grad(loss, (0, 1))(x, w)

        return per_rank(local, 4)

    # Of the first layer alone, where the error that comes in is zero on both sides, the values are the same too.
    for ours, theirs in zip(gradients(True)(x_P, w_P[:, :1]), gradients(False)(x_P, w_P[:, :1])):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-4)
    policy = jax.checkpoint_policies.save_only_these_names(*taco_jax.collectives.REMAT_NAMES)

    def local(x, w):
        @lambda f: jax.checkpoint(f, policy=policy)
        def layer(carry, w):
            y, error = taco_jax.psum_with_feedback(jnp.sin(carry[0]) * w, "tp", carry[1], compression="int4h")
            return carry[0] + y, error

        loss = lambda w: jnp.square(
            lax.scan(lambda c, w: (layer(c, w), None), (lax.psum(x, "tp"), jnp.zeros_like(x)), w)[0][0]
        ).sum()
        return jax.grad(loss)(w)

    sent = [c for c in collectives(per_rank(local, 4).lower(x_P, w_P).compile()) if c[1] == "uint8"]
    assert len(sent) == 2  # one message of two hops in the forward loop, none in the backward one


def test_the_slot_is_that_of_psum():
    """The largest scale of the site reaches its slot through the gradient, as from psum."""
    x_P = terms(4)

    def slots(entry):
        def local(x, slot):
            scales_of = lambda slot: taco_jax.SiteScales(np.array([-4, -4], np.int32), slot)
            return jax.grad(lambda slot: jnp.square(entry(x, scales_of(slot))).sum())(slot)

        return np.asarray(per_rank(local, 4)(x_P, np.zeros((4, 2, 1), np.float32)))

    ours = slots(lambda x, scales: taco_jax.psum_with_feedback(x, "tp", compression="taco", scales=scales)[0])
    theirs = slots(lambda x, scales: taco_jax.psum(x, "tp", compression="taco", scales=scales))
    np.testing.assert_array_equal(ours, theirs)
    assert ours[:, 0].all()


def test_every_device_holds_the_same_sum():
    mesh = make_mesh(tp=4)
    f = lambda x: taco_jax.psum_with_feedback(x[0], "tp", compression="mxfp4")
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=(P(), P("tp"))))
    y, _ = f(terms(4))
    assert len(set(bits_of_every_device(y))) == 1


@pytest.mark.parametrize(
    "change,message",
    [
        ({"algorithm": "hierarchical"}, "psum_with_feedback: algorithm='hierarchical' knows no errors; it must be"),
        ({"link": "nvlink"}, "psum_with_feedback: link='nvlink' knows no errors; it must be 'auto' or 'nccl'"),
        ({"between_hosts": "int4h"}, "psum_with_feedback: between_hosts='int4h' knows no errors; it must be None"),
    ],
)
def test_ways_that_keep_no_wires_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        fed_back(4, codec="int4h", **change)(terms(4), terms(4))
    with pytest.raises(ValueError, match=message.replace("psum_with_feedback", "error_feedback=True")):
        Compression("int4h", error_feedback=True, **change)


def test_bad_arguments_are_named():
    x_P = terms(4)
    with pytest.raises(ValueError, match=r"error is of shape \(6, 128\): must be x's, \(6, 136\)"):
        fed_back(4, codec="int4h")(x_P, x_P[..., :128])
    with pytest.raises(TypeError, match="x is int32: must be one float array"):
        fed_back(4, codec="int4h")(x_P.astype(np.int32), x_P)
    with pytest.raises(TypeError, match="error is float: must be an array of x's shape, or None"):
        per_rank(lambda x: taco_jax.psum_with_feedback(x, "tp", 0.0, compression="int4h"), 4)(x_P)
    with pytest.raises(TypeError, match="x is tuple: must be one float array"):
        per_rank(lambda x: taco_jax.psum_with_feedback((x, x), "tp", compression="int4h"), 4)(x_P)
    with pytest.raises(TypeError, match="error_feedback=1: must be True or False"):
        Compression("int4h", error_feedback=1)
    with pytest.raises(ValueError, match="error_feedback=True: with_product=True knows no errors"):
        Compression("int4h", error_feedback=True, with_product=True)
