"""Gradients: values against jax.lax, what the amax slots receive, remat, and how many collectives a gradient holds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from hlo import collectives, counts
from jax import lax
from jax.sharding import PartitionSpec as P
from pairs import pairwise
from reference_codec import ELEMENTS, REFERENCES
from shards import per_rank

import taco_jax
from taco_jax import CODECS, Compression, SiteScales
from taco_jax import tensor_parallel as tp
from taco_jax.scales import STATS_WIDTH


def ranks():
    return lax.axis_size("tp")


# Every collective of a varying x as f(module, x, **codec), and whether its result is the same on all ranks.
COLLECTIVES = {
    "psum": (lambda m, x, **kw: m.psum(x, "tp", **kw), True),
    "psum_scatter": (lambda m, x, **kw: m.psum_scatter(x, "tp", scatter_dimension=1, tiled=True, **kw), False),
    "psum_scatter_untiled": (lambda m, x, **kw: m.psum_scatter(x[:, :ranks()], "tp", scatter_dimension=1, **kw), False),
    "all_gather": (lambda m, x, **kw: m.all_gather(x, "tp", axis=1, tiled=True, **kw), False),
    "all_gather_untiled": (lambda m, x, **kw: m.all_gather(x, "tp", axis=-1, **kw), False),
    "all_gather_invarying": (lambda m, x, **kw: m.all_gather(x, "tp", axis=1, to="invarying", **kw), True),
    "all_gather_tiled_invarying": (lambda m, x, **kw: m.all_gather(x, "tp", tiled=True, to="invarying", **kw), True),
    "all_to_all": (lambda m, x, **kw: m.all_to_all(x, "tp", 1, 0, tiled=True, **kw), False),
    "ppermute": (lambda m, x, **kw: m.ppermute(x, "tp", [(0, 1)], **kw), False),
}  # fmt: skip
# Relative error of a gradient by one 8-bit message. psum's and the invarying gather's backward pass sends nothing.
SENT_BACKWARD = ("psum_scatter", "psum_scatter_untiled", "all_gather", "all_gather_untiled", "all_to_all", "ppermute")


def weights(y):
    """A cotangent that differs everywhere and, where y varies, on every rank."""
    w = jnp.cos(jnp.arange(y.size, dtype=jnp.float32) * 0.37).reshape(y.shape).astype(y.dtype)
    return w if not jax.typeof(y).manual_axis_type.varying else w * (1 + lax.axis_index("tp").astype(y.dtype))


def gradient(name, module, ranks, **codec):
    f = COLLECTIVES[name][0]

    def loss(x):
        y = f(module, x, **codec)
        return jnp.sum(weights(y) * y)  # where y varies: the gradient of the sum of all ranks' losses

    return per_rank(jax.grad(loss), ranks)


def relative(g, expected):
    g, expected = np.float64(g), np.float64(expected)
    return np.linalg.norm(g - expected) / np.linalg.norm(expected)


def x_of(ranks, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=(ranks, 8, 48)).astype(dtype)


@pytest.mark.parametrize(
    "name,codec,ranks", pairwise(name=tuple(COLLECTIVES), codec=("none", "taco", "int8h"), ranks=(2, 4, 8))
)
def test_gradient_values_of_every_collective(name, codec, ranks):
    x_P = x_of(ranks)
    expected = np.asarray(gradient(name, lax, ranks)(x_P))
    program = gradient(name, taco_jax, ranks, codec=codec)
    g = np.asarray(program(x_P))
    if codec == "none" or name not in SENT_BACKWARD:
        np.testing.assert_allclose(g, expected, rtol=1e-6, atol=1e-6)
    else:
        assert 0 < relative(g, expected) < {"taco": 0.05, "int8h": 0.02}[codec]
        assert np.linalg.norm(g) / np.linalg.norm(expected) == pytest.approx(1, abs=0.03)
        found = collectives(program.lower(x_P).compile())
        assert found and {dtype for _, dtype, _ in found} == {"uint8"}


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradient_of_copy(ranks, algorithm):
    """f: the cotangents of all ranks are added up, once."""
    w_P = x_of(ranks)
    x = x_of(1)[0]
    mesh = make_mesh(tp=ranks)

    def local(x, w):
        return jax.grad(lambda x: jnp.sum(w[0] * taco_jax.copy(x, "tp", codec="int8h", algorithm=algorithm)))(x)

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P()))
    assert 0 < relative(f(x, w_P), w_P.sum(0)) < 0.015
    expected = {"one_shot": {"all-gather": 1}, "two_shot": {"all-gather": 1, "all-to-all": 1}}
    assert counts(f.lower(x, w_P).compile()) == expected[algorithm]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_second_derivatives(name):
    """Codes have no derivative of their own: differentiated as they are, parts of the gradient's gradient vanish."""
    f, x_P = COLLECTIVES[name][0], x_of(2)

    def second(module, **codec):
        square = lambda x: jnp.sum(f(module, x**2, **codec) ** 2)
        return np.asarray(per_rank(jax.grad(lambda x: jnp.sum(jax.grad(square)(x) * jnp.cos(x))), 2)(x_P))

    expected = second(lax)
    np.testing.assert_allclose(second(taco_jax, codec="none"), expected, rtol=1e-5, atol=1e-5)
    assert relative(second(taco_jax, codec="int8h"), expected) < 0.05


def test_copy_of_a_varying_value_raises():
    with pytest.raises(ValueError, match="copy: x already varies over 'tp'"):
        per_rank(lambda x: taco_jax.copy(x, "tp", codec="taco"), 2)(x_of(2))


def test_forward_and_backward_codec_are_told_apart():
    x_P = x_of(4)
    big = np.tile(x_P, (1, 40, 1))

    def f(x):
        loss = lambda x: jnp.sum(taco_jax.psum_scatter(x, "tp", tiled=True, codec="int4h", backward_codec="int8h") ** 2)
        return jax.grad(loss)(x)

    forward, backward = (CODECS[c].wire_bytes(big[0].size // 4) for c in ("int4h", "int8h"))
    assert forward != backward
    found = collectives(per_rank(f, 4).lower(big).compile())
    assert found == [("all-gather", "uint8", 4 * backward), ("all-to-all", "uint8", 4 * forward)]


# Megatron's pairs, as a model uses them


D, F, L = 32, 64, 24
EXACT = jax.lax.Precision.HIGHEST


def mlp_parameters(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
    return {"up": normal(D, F), "b_up": normal(F), "down": normal(F, D), "b_down": normal(D), "norm": 1 + normal(D)}


SPECS = {"up": P(None, "tp"), "b_up": P("tp"), "down": P("tp"), "b_down": P(), "norm": P()}


def mlp(w, x, compression, scales=None, sequence_dim=None):
    """Column- then row-parallel, with a replicated weight before it whose gradient must be whole."""
    norm = tp.to_varying(w["norm"], "tp") if sequence_dim is not None else w["norm"]
    scales = scales or {"up": None, "down": None}
    options = {"axis": "tp", "compression": compression, "sequence_dim": sequence_dim, "precision": EXACT}
    y = tp.column_dense(x * norm, w["up"], w["b_up"], scales=scales["up"], site="up", **options)
    b_down = tp.to_varying(w["b_down"], "tp") if sequence_dim is not None else w["b_down"]
    return x + tp.row_dense(jnp.tanh(y), w["down"], b_down, scales=scales["down"], site="down", **options)


def mlp_unsharded(w, x):
    y = jnp.tanh(jnp.matmul(x * w["norm"], w["up"], precision=EXACT) + w["b_up"])
    return x + jnp.matmul(y, w["down"], precision=EXACT) + w["b_down"]


def mlp_program(ranks, compression, sequence_parallel):
    def local(w, x):
        y = mlp(w, x, compression, sequence_dim=0 if sequence_parallel else None)
        loss = jnp.mean(y**2)
        return lax.pmean(loss, "tp") if sequence_parallel else loss

    x_spec = P("tp") if sequence_parallel else P()
    step = jax.shard_map(
        jax.value_and_grad(local, argnums=(0, 1)), mesh=make_mesh(tp=ranks), in_specs=(SPECS, x_spec),
        out_specs=(P(), (SPECS, x_spec)),
    )  # fmt: skip
    return jax.jit(step)


def x_mlp():
    return np.random.default_rng(9).normal(size=(L, D)).astype(np.float32)


def check_pair(codec, ranks, sequence_parallel):
    w, x = mlp_parameters(), x_mlp()
    expected_loss, expected = jax.jit(
        jax.value_and_grad(lambda w, x: jnp.mean(mlp_unsharded(w, x) ** 2), argnums=(0, 1))
    )(w, x)
    loss, grads = mlp_program(ranks, codec, sequence_parallel)(w, x)
    names = [*w, "x"]
    leaves = dict(zip(names, [*(grads[0][k] for k in w), grads[1]]))
    wanted = dict(zip(names, [*(expected[0][k] for k in w), expected[1]]))
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in wanted.values()))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6 if codec is None else 0.01)
    for name in names:
        g, ref = np.float64(leaves[name]), np.float64(wanted[name])
        if codec is None:
            assert np.linalg.norm(g - ref) <= 1e-5 * max(np.linalg.norm(ref), 1e-4 * norm), name
        else:
            assert relative(g, ref) <= 0.15, name
            assert np.linalg.norm(g) / np.linalg.norm(ref) == pytest.approx(1, abs=0.05), name


PAIRS = {"codec": (None, "taco", "int8h", "mxfp8"), "ranks": (1, 2, 4, 8), "sequence_parallel": (False, True)}


@pytest.mark.parametrize("codec,ranks,sequence_parallel", pairwise(**PAIRS))
def test_gradients_of_the_pairs_are_those_of_the_unsharded_model(codec, ranks, sequence_parallel):
    check_pair(codec, ranks, sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("codec,ranks,sequence_parallel", list(itertools.product(*PAIRS.values())))
def test_gradients_of_the_pairs_everywhere(codec, ranks, sequence_parallel):
    check_pair(codec, ranks, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_row_bias_is_added_once(sequence_parallel):
    w, x = mlp_parameters(), np.zeros((L, D), np.float32)
    w = {k: np.zeros_like(v) for k, v in w.items()} | {"b_down": np.arange(D, dtype=np.float32)}
    mesh = make_mesh(tp=4)
    dim = 0 if sequence_parallel else None
    spec = P("tp") if sequence_parallel else P()
    f = jax.shard_map(
        functools.partial(mlp, compression="taco", sequence_dim=dim), mesh=mesh, in_specs=(SPECS, spec), out_specs=spec
    )
    np.testing.assert_array_equal(jax.jit(f)(w, x), np.broadcast_to(w["b_down"], (L, D)))


def test_dtype_and_promotion():
    w, x = mlp_parameters(), x_mlp()

    def local(w, x):
        y = tp.column_dense(x, w["up"], w["b_up"], axis="tp", compression="taco", dtype=jnp.bfloat16)
        z = tp.row_dense(y, w["down"], w["b_down"], axis="tp", compression="taco")
        return tp.reduce_from_tp(jnp.sum(y.astype(jnp.float32)), "tp"), z, jnp.zeros((), y.dtype)

    f = jax.jit(jax.shard_map(local, mesh=make_mesh(tp=2), in_specs=(SPECS, P()), out_specs=P()))
    _, z, y = f(w, x)
    assert y.dtype == jnp.bfloat16 and z.dtype == jnp.float32


def test_compression_options_arrive():
    """min_bytes and algorithm of a Compression reach the collective."""
    x_P = x_of(4)
    for compression, expected in {
        Compression("int8h", min_bytes=0): {"all-to-all": 1, "all-gather": 1},
        Compression("int8h", min_bytes=0, algorithm="one_shot"): {"all-gather": 1},
        Compression("int8h", min_bytes=x_P[0].nbytes + 1): {"all-reduce": 1},
        None: {"all-reduce": 1},
    }.items():
        f = per_rank(lambda x, c=compression: tp.reduce_from_tp(x, "tp", c), 4, invarying_out=True)
        assert counts(f.lower(x_P).compile()) == expected


@pytest.mark.parametrize("entry", [tp.copy_to_tp, tp.reduce_from_tp, tp.gather_from_sp, tp.scatter_to_sp])
@pytest.mark.parametrize("compression", [None, "taco"])
def test_pairs_check_their_region(entry, compression):
    keywords = {"dim": 0} if entry in (tp.gather_from_sp, tp.scatter_to_sp) else {}
    f = lambda x: entry(x, "tp", compression, **keywords)
    mesh = make_mesh(dp=2, tp=2)
    x = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match="not a manual mesh axis here"):
        f(x)
    with pytest.raises(ValueError, match="check_vma=False"):
        jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)
    with pytest.raises(ValueError, match=r"not over \['dp'\]"):
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"tp"}))(x)


def test_in_manual_region():
    seen = []
    f = lambda x: (seen.append([tp.in_manual_region(a) for a in ("tp", "dp", ("dp", "tp"), "none")]), x)[1]
    mesh = make_mesh(dp=2, tp=2)
    x = np.ones((4, 4), np.float32)
    f(x)
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P()))(x)
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"tp"}))(x)
    assert seen == [[False] * 4, [True, True, True, False], [True, False, False, False]]


# Site scales through the custom_vjp


def slots_of(f, ranks, x_P, exponents, width=1, **options):
    """The slot's cotangent on each rank of the sum of all losses f(x, scales), float32[P, 2, K], and x's."""

    def local(x, slot):
        g = jax.grad(lambda slot, x: f(x, SiteScales(exponents, slot)), argnums=(0, 1))(slot, x)
        return g

    slots = np.zeros((ranks, 2, width), np.float32)
    return jax.tree.map(np.asarray, per_rank(local, ranks, **options)(x_P, slots))


def largest(ref, x):
    return np.abs(ref.to_blocks(x)).max() / ELEMENTS[ref.element][1]


@pytest.mark.parametrize("hop", ["first", "second"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_slot_of_a_psum_is_the_largest_scale_of_both_hops(algorithm, hop):
    ref, a = REFERENCES["taco"], -5
    base = np.random.default_rng(0).normal(size=4 * 600).astype(np.float32)
    # Equal terms add up to a second hop of 4 times the scale; terms that cancel make the first hop the larger one.
    signs = np.array([1, 1, 1, 1] if hop == "second" else [1, -1, 1, -1], np.float32)
    tilt = np.array([1, 1.5, 0.7, 0.3], np.float32)  # so that the ranks differ
    x_P = base * (signs * tilt)[:, None]
    f = lambda x, scales: jnp.sum(taco_jax.psum(x, "tp", codec="taco", algorithm=algorithm, scales=scales))
    slots, _ = slots_of(f, 4, x_P, np.array([a, 7], np.int32))

    n = 128 * 5  # 2,400 elements: 19 blocks, 5 to a rank
    chunks = np.pad(x_P, ((0, 0), (0, 4 * n - 2400))).reshape(4, 4, n)
    for rank in range(4):
        expected = largest(ref, x_P[rank])
        if algorithm == "two_shot":
            total = np.float32(0)
            for p in range(4):
                z = ref.to_blocks(chunks[p, rank])
                total = total + (z if p == rank else ref.encode_blocks(z, a)[1])
            second = np.abs(total).max() / 448
            assert (second > expected) == (hop == "second")
            expected = max(expected, second)
        assert slots[rank, 0, 0] == pytest.approx(expected, rel=1e-5)
        assert slots[rank, 1, 0] == 0  # psum has no backward message


@pytest.mark.parametrize("name", ["psum_scatter", "all_gather", "all_to_all", "ppermute"])
def test_slots_of_both_directions(name):
    ref = REFERENCES["int8h"]
    x_P = x_of(4) * np.array([1, 2, 3, 4], np.float32)[:, None, None]
    f = COLLECTIVES[name][0]
    w = lambda y: weights(y) * 100

    def loss(x, scales):
        y = f(taco_jax, x, codec="int8h", scales=scales)
        return jnp.sum(w(y) * y)

    slots, _ = slots_of(loss, 4, x_P, np.array([-3, -2], np.int32))
    y_shape = {"psum_scatter": (8, 12), "all_gather": (8, 192), "all_to_all": (32, 12), "ppermute": (8, 48)}[name]
    for rank in range(4):
        pieces = np.split(x_P[rank], 4, axis=1) if name in ("psum_scatter", "all_to_all") else [x_P[rank]]
        assert slots[rank, 0, 0] == pytest.approx(max(largest(ref, p) for p in pieces), rel=1e-5)
        ct = np.cos(np.arange(np.prod(y_shape)) * 0.37).reshape(y_shape).astype(np.float32) * (1 + rank) * 100
        axis = {"all_gather": 1, "all_to_all": 0}.get(name)
        pieces = [ct] if axis is None else np.split(ct, 4, axis=axis)
        assert slots[rank, 1, 0] == pytest.approx(max(largest(ref, p) for p in pieces), rel=1e-4)


def test_slot_of_copy_has_only_a_backward_message():
    ref = REFERENCES["taco"]
    mesh = make_mesh(tp=4)
    x, w_P = x_of(1)[0], x_of(4)

    def local(x, w, slot):
        f = lambda slot: jnp.sum(
            w[0] * taco_jax.copy(x, "tp", codec="taco", algorithm="one_shot", scales=SiteScales(None, slot))
        )
        return jax.grad(f)(slot[0])[None]

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("tp"), P("tp")), out_specs=P("tp")))
    slots = np.asarray(f(x, w_P, np.zeros((4, 2, 1), np.float32)))
    for rank in range(4):
        assert slots[rank, 0, 0] == 0 and slots[rank, 1, 0] == pytest.approx(largest(ref, w_P[rank]), rel=1e-5)


def test_slots_are_nan_where_data_is_and_zero_where_it_is_zero():
    f = lambda x, scales: jnp.sum(taco_jax.psum_scatter(x, "tp", tiled=True, codec="taco", scales=scales))
    x_P = np.zeros((2, 4, 8), np.float32)
    slots, _ = slots_of(f, 2, x_P, np.zeros(2, np.int32))
    assert (slots[:, 0] == 0).all() and (slots[:, 1] > 0).all()
    x_P[1, 0, 0] = np.inf
    slots, _ = slots_of(f, 2, x_P, np.zeros(2, np.int32))
    assert slots[0, 0, 0] == 0 and not np.isfinite(slots[1, 0, 0])


def test_wide_slots_carry_statistics():
    x_P = x_of(4)
    f = lambda x, scales: jnp.sum(taco_jax.psum(x, "tp", codec="int8h", algorithm="one_shot", scales=scales))
    slots, _ = slots_of(f, 4, x_P, np.zeros(2, np.int32), width=STATS_WIDTH)
    amax, signal, noise, clipped, flushed, count = slots[:, 0].T
    assert (slots[:, 1] == 0).all()
    np.testing.assert_allclose(amax, [largest(REFERENCES["int8h"], x) for x in x_P], rtol=1e-5)
    np.testing.assert_allclose(signal, (x_P**2).sum((1, 2)), rtol=1e-4)
    assert (10 * np.log10(signal / noise) == pytest.approx(43.7, abs=1)) and (count == 384).all()
    assert (clipped == 0).all() and (flushed < 8).all()


def test_exponents_and_slots_change_no_gradient_and_exponents_no_types():
    x_P = x_of(4)
    w = weights

    def loss(x, scales):
        y = taco_jax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True, codec="int8h", scales=scales)
        return jnp.sum(w(y) * y)

    _, with_slot = slots_of(loss, 4, x_P, np.zeros(2, np.int32))
    without = np.asarray(per_rank(jax.grad(lambda x: loss(x, None)), 4)(x_P))
    np.testing.assert_array_equal(with_slot, without)  # int8h has a bfloat16 scale: exponents do not matter


def test_each_direction_uses_its_own_exponent():
    x_P = x_of(4)

    def loss(x, scales):
        y = taco_jax.psum_scatter(x, "tp", tiled=True, codec="taco", scales=scales)
        return jnp.sum(jnp.sin(3 * y))

    def run(exponents):
        return slots_of(loss, 4, x_P, np.array(exponents, np.int32))[1]

    good, forward_off, backward_off = run([-6, -6]), run([-40, -6]), run([-6, -40])
    assert relative(run([-3, -3]), good) < 0.1
    # 40 bits too low everything clips at 2^-40 * 2^16 * 1.75 * 448: a hop then sends next to nothing.
    assert relative(forward_off, good) > 0.3
    own = np.stack([backward_off[r, 2 * r : 2 * r + 2] for r in range(4)])
    assert relative(backward_off, good) > 0.3 and np.abs(own).max() < 1e-3


def test_a_slot_that_varies_too_little_is_an_error():
    def local(x):
        return jax.grad(lambda slot: jnp.sum(taco_jax.psum(x, "tp", codec="taco", scales=SiteScales(None, slot))))(
            jnp.zeros((2, 1))
        )

    with pytest.raises(ValueError, match="amax slot: it must vary over"):
        per_rank(local, 2)(x_of(2))


# Remat


LAYERS = 3


def stack_program(remat, sequence_parallel=False, compression="taco"):
    def layer(x, w):
        w, slots = w
        scales = {k: SiteScales(np.array([-6, -6], np.int32), slots[i]) for i, k in enumerate(("up", "down"))}
        # tanh's gradient needs the sum, so a layer that is not told to keep it sums again.
        return jnp.tanh(mlp(w, x, compression, scales, 0 if sequence_parallel else None))

    policy = jax.checkpoint_policies.save_only_these_names(*tp.REMAT_NAMES)
    body = {"none": layer, "full": jax.checkpoint(layer), "named": jax.checkpoint(layer, policy=policy)}[remat]

    def local(w, slots, x):
        def loss(w, slots):
            y, _ = lax.scan(lambda x, w: (body(x, w), None), x, (w, slots[:, 0]))
            loss = jnp.mean(y**2)
            return lax.pmean(loss, "tp") if sequence_parallel else loss

        return jax.grad(loss, argnums=(0, 1))(w, slots)

    specs = jax.tree.map(lambda spec: P(None, *spec), SPECS, is_leaf=lambda s: isinstance(s, P))
    slots = P(None, "tp")
    x_spec = P("tp") if sequence_parallel else P()
    step = jax.shard_map(local, mesh=make_mesh(tp=4), in_specs=(specs, slots, x_spec), out_specs=(specs, slots))
    return jax.jit(step)


def stack_arguments():
    w = jax.tree.map(lambda *leaves: np.stack(leaves), *[mlp_parameters(seed) for seed in range(LAYERS)])
    return w, np.zeros((LAYERS, 4, 2, 2, 1), np.float32), x_mlp()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_remat_repeats_no_communication(sequence_parallel):
    """Counted in the bodies of the two loops: one all-reduce (or gather and scatter) per layer and direction."""
    arguments = stack_arguments()
    found, grads = {}, {}
    for remat in ("none", "named", "full"):
        f = stack_program(remat, sequence_parallel)
        found[remat] = [c for c in collectives(f.lower(*arguments).compile()) if c[1] == "uint8"]
        grads[remat] = jax.tree.map(np.asarray, f(*arguments))
    assert len(found["none"]) == 4
    assert found["named"] == found["none"]
    assert len(found["full"]) > len(found["none"])  # so the count can see a repeated message
    for remat in ("named", "full"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads[remat], grads["none"])
    assert (grads["named"][1][..., 0].sum((0, 1)) > 0).sum() >= 2  # slots arrive through the scan


def test_remat_repeats_no_exact_communication_below_min_bytes():
    arguments = stack_arguments()
    small = Compression("taco", "taco", min_bytes=1 << 30)
    found = {
        remat: counts(stack_program(remat, compression=small).lower(*arguments).compile())["all-reduce"]
        for remat in ("none", "named", "full")
    }
    assert found["named"] == found["none"] < found["full"]
