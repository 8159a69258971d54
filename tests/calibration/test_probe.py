"""What a probe measures, against numpy on the collectives' own results, with gradients that are known.

Dims: P ranks, B, L, D.
"""

import dataclasses
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from reference_codec import Reference
from reference_collectives import model_sum, model_two_shot

from taco_jax import collectives
from taco_jax.calibration.probe import Probe
from taco_jax.codec import as_codec
from taco_jax.collectives.vjp import probed_by
from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import SiteScales
from taco_jax.tensor_parallel import to_varying

RANKS, SHAPE = 4, (2, 8, 32)
CODECS = ("int4h", "int8h,block=32")
PROBE = Probe(tuple(map(as_codec, CODECS)), as_codec("int4h"))
WIDTH = PROBE.width(SHAPE[-1])
OPTIONS = Compression("int6h", min_bytes=0, algorithm="two_shot")


def _values(seed, *leading):
    values = np.random.default_rng(seed).normal(size=(*leading, *SHAPE)).astype(np.float32)
    values[..., 3] *= 9  # one outlying channel
    return values


def _run(function, *arrays, switches=(0, 0)):
    """(values, measures of each slot float[2, K] summed over ranks) of function(slots, own arrays) -> loss."""
    mesh = make_mesh(tp=RANKS)

    def local(switch, *own):
        own = [a[0] if varies else a for a, varies in zip(own, spread)]
        slots = [to_varying(jnp.zeros((2, WIDTH)), "tp") for _ in range(2)]
        loss = lambda slots, first: function([SiteScales(switch, slot) for slot in slots], first, *own[1:])
        grads, aux = jax.grad(loss, argnums=(0, 1), has_aux=True)(slots, own[0])
        return lax.psum(grads[0], "tp"), lax.all_gather(grads[1], "tp", to="invarying"), aux

    spread = [a.ndim == 4 for a in arrays]
    specs = (P(), *(P("tp") if varies else P() for varies in spread))
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))
    with probed_by(PROBE):
        measures, gradient, aux = mapped(np.array(switches, np.int32), *arrays)
    return [PROBE.read(np.asarray(m, np.float64)) for m in measures], np.asarray(gradient), np.asarray(aux)


def _references():
    return [Reference(*dataclasses.astuple(as_codec(codec))[:4]) for codec in CODECS]


def _check_head(read, direction, x_P, y, copies):
    head, _, channels = read
    row = ("forward", "backward").index(direction)
    got = {name: values[row] for name, values in head.items()}
    want = {
        "values": x_P.size, "square": (x_P**2.0).sum(), "fourth": (x_P.astype(np.float64) ** 4).sum(),
        "results": copies * y.size, "signal": copies * (y.astype(np.float64) ** 2).sum(),
    }  # fmt: skip
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(channels[row], (x_P.astype(np.float64) ** 2).reshape(-1, SHAPE[-1]).sum(0), rtol=1e-4)


def _check_errors(read, direction, errors, g, g_fed=None, copies=1):
    of_codec = read[1]
    row = ("forward", "backward").index(direction)
    for k, error in enumerate(errors):
        want = {"noise": (error**2).sum()}
        for end, gradient in (("", g), ("_fed", g_fed)):
            product = None if gradient is None else gradient * error
            want[f"diagonal{end}"] = 0 if product is None else (product**2).sum()
            want[f"product{end}"] = 0 if product is None else (product.sum(-1) ** 2).sum()
        for name, value in want.items():
            np.testing.assert_allclose(of_codec[name][row, k], copies * value, rtol=2e-3, atol=1e-9, err_msg=name)


def _errors_left(x_P, codec):
    """Each rank's error of a sum of x_P, by the collective itself."""
    options = dataclasses.replace(OPTIONS, forward=codec, backward=codec)
    local = lambda x: collectives.psum_with_feedback(x[0], "tp", compression=options)[1][None]
    mapped = jax.shard_map(local, mesh=make_mesh(tp=RANKS), in_specs=P("tp"), out_specs=P("tp"))
    return np.asarray(jax.jit(mapped)(x_P))


def test_sums_that_feed_back():
    """The second sum's gradient is what an error of the first one, taken along, no longer meets."""
    x1_P, x2_P, c1, c2 = _values(0, RANKS), _values(1, RANKS), _values(2), _values(3)
    options = dataclasses.replace(OPTIONS, error_feedback=True)

    def loss(scales, x1, x2, c1, c2):
        zeros = to_varying(jnp.zeros(SHAPE), "tp")
        y1, carrier = collectives.psum_with_feedback(x1, "tp", zeros, compression=options, scales=scales[0])
        y2, _ = collectives.psum_with_feedback(x2, "tp", carrier, compression=options, scales=scales[1])
        return jnp.sum(c1 * y1) + jnp.sum(c2 * y2), y1

    (first, second), gradient, y1 = _run(loss, x1_P, x2_P, c1, c2)
    np.testing.assert_allclose(y1, x1_P.sum(0), rtol=1e-5, atol=1e-5)  # exact sums, and exact gradients
    np.testing.assert_allclose(gradient, np.broadcast_to(c1, gradient.shape), rtol=1e-6)
    # The second sum sends what one in `before` has left, and loses of both together.
    before_P = _errors_left(x1_P, "int5h")
    for read, x_P, error_P, g, g_fed in ((first, x1_P, 0 * x1_P, c1, c1 - c2), (second, x2_P, before_P, c2, c2)):
        _check_head(read, "forward", x_P, x_P.sum(0), copies=RANKS)
        sent_P = x_P + error_P
        errors = [model_two_shot(reference, sent_P, None)[0][0] - sent_P.sum(0) for reference in _references()]
        _check_errors(read, "forward", errors, g, g_fed, copies=RANKS)
        assert not read[0]["values"][1]  # the way back sends nothing


def test_a_copys_backward_sum_and_its_injected_error():
    x, c_P = _values(4), _values(5, RANKS)
    loss = lambda scales, x, c: (jnp.sum(c * collectives.copy(x, "tp", compression=OPTIONS, scales=scales[0])), x)
    (read, _), gradient, _ = _run(loss, x, c_P)
    total = c_P.sum(0)
    np.testing.assert_allclose(gradient, np.broadcast_to(total, gradient.shape), rtol=1e-5, atol=1e-5)
    _check_head(read, "backward", c_P, total, copies=RANKS)
    sent = [model_two_shot(reference, c_P, None)[0][0] for reference in _references()]
    _check_errors(read, "backward", [y - total for y in sent], None, copies=RANKS)
    _, gradient, _ = _run(loss, x, c_P, switches=(1, 0))  # of the other direction
    np.testing.assert_allclose(gradient[0], total, rtol=1e-5, atol=1e-5)
    _, gradient, _ = _run(loss, x, c_P, switches=(0, 1))
    np.testing.assert_allclose(gradient[0], sent[0], rtol=1e-4, atol=1e-4)


def test_sequence_parallel_messages():
    """The gradient at a gather's result is the sum of all ranks'; a scatter's is each rank's own slice."""
    x_P, c_P = _values(6, RANKS), _values(7, RANKS)
    long_P = np.concatenate([c_P] * RANKS, 2)  # of the gathered L

    def loss(scales, x, c):
        whole = collectives.all_gather(x, "tp", axis=1, tiled=True, compression=OPTIONS, scales=scales[0])
        part = collectives.psum_scatter(
            whole * c, "tp", scatter_dimension=1, tiled=True, compression=OPTIONS, scales=scales[1]
        )
        return jnp.sum(part), lax.psum(part, "tp")

    (gather, scatter), _, _ = _run(loss, x_P, long_P)
    whole = np.concatenate(list(x_P), 1)
    _check_head(gather, "forward", x_P, whole, copies=RANKS)
    sent = [np.concatenate([reference.round_trip(x, None) for x in x_P], 1) for reference in _references()]
    _check_errors(gather, "forward", [y - whole for y in sent], long_P.sum(0), copies=RANKS)
    terms_P = whole[None] * long_P
    _check_head(scatter, "forward", terms_P, terms_P.sum(0), copies=1)
    pieces_PP = np.stack([np.split(terms, RANKS, axis=1) for terms in terms_P])
    piece = pieces_PP.shape[2:]
    sums = lambda reference: [
        reference.from_blocks(model_sum(reference, pieces_PP[:, rank], rank, None), np.prod(piece)).reshape(piece)
        for rank in range(RANKS)
    ]
    errors = [np.concatenate(sums(reference), 1) - terms_P.sum(0) for reference in _references()]
    _check_errors(scatter, "forward", errors, np.ones_like(errors[0]))


@pytest.mark.parametrize("operation", ["psum", "copy"])
def test_candidates_wait_for_the_gradient_and_it_for_them(operation):
    """Beside a loop over layers, which XLA would start meanwhile, ranks meet in different collectives and abort."""

    def compiled(pick):
        def local(x, c):
            c = lax.ppermute(c[0], "tp", [(rank, rank ^ 1) for rank in range(RANKS)])

            def loss(slot, x):
                scales = SiteScales(jnp.zeros(2, jnp.int32), slot)
                if operation == "psum":
                    return jnp.sum(lax.psum(c, "tp") * collectives.psum(x, "tp", compression=OPTIONS, scales=scales))
                return jnp.sum(c * collectives.copy(lax.psum(x, "tp"), "tp", compression=OPTIONS, scales=scales))

            return pick(*jax.grad(loss, argnums=(0, 1))(to_varying(jnp.zeros((2, WIDTH)), "tp"), x[0]))[None]

        mapped = jax.shard_map(local, mesh=make_mesh(tp=RANKS), in_specs=P("tp"), out_specs=P("tp"))
        with probed_by(PROBE):
            return jax.jit(mapped).lower(_values(8, RANKS), _values(9, RANKS)).compile()

    # What a gradient does not need XLA leaves out.
    assert hlo.counts(compiled(lambda slot, gradient: gradient))["all-to-all"] == len(CODECS)
    needs, sent = {}, []
    for line in compiled(lambda slot, gradient: slot).as_text().splitlines():
        name, *operands = re.findall(r"%([\w.-]+)", line.partition(", metadata=")[0]) or [""]
        needs[name] = {name}.union(*(needs.get(operand, ()) for operand in operands))  # the text is in order
        sent += [needs[name]] if " all-to-all(" in line else []
    assert len(sent) == len(CODECS)
    assert all(any("permute" in name for name in names) for names in sent)


def test_a_slot_of_another_width_is_refused():
    with pytest.raises(ValueError, match=f"a slot of {WIDTH} columns, of 16 channels must have {WIDTH - 16}"):
        _run(lambda scales, x: (jnp.sum(collectives.psum(
            x[..., :16], "tp", compression=OPTIONS, scales=scales[0])), x), _values(0, RANKS))  # fmt: skip


def test_outside_of_a_probe_slots_are_as_they_were():
    with pytest.raises(ValueError, match=r"scales.slot is float32\[2, 60\]: must be"):
        mesh = make_mesh(tp=RANKS)
        slot = np.zeros((2, 60), np.float32)
        local = lambda x: collectives.psum(x[0], "tp", compression=OPTIONS, scales=SiteScales(None, slot))
        jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P())(_values(0, RANKS))
