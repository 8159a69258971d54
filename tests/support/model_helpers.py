"""Runs a decoder on an emulated mesh: `Run(config, tp=4, ...)` gives gradients, logits and compiled text."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from helpers import make_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.collectives import comm_log
from taco_jax.compression.compression import Compression, Plan
from taco_jax.compression.site_scales import UNCALIBRATED, SiteScales
from taco_jax.models import decoder
from taco_jax.models.config import ModelConfig
from taco_jax.models.run_config import Parallel

QWEN2 = ModelConfig(
    vocab_size=300, d_model=32, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=8, d_mlp=64, qkv_bias=True, max_length=64
)
QWEN3 = dataclasses.replace(QWEN2, qkv_bias=False, qk_norm=True, n_kv_heads=4, tied_head=True)
LLAMA = dataclasses.replace(QWEN2, qkv_bias=False, n_kv_heads=8)
GPT2 = ModelConfig(
    vocab_size=300, d_model=32, n_layers=2, n_heads=8, n_kv_heads=8, head_dim=4, d_mlp=128, norm="layernorm",
    norm_eps=1e-5, positions="learned", max_length=64, activation="gelu_tanh", gated_mlp=False, qkv_bias=True,
    out_bias=True, mlp_bias=True, tied_head=True,
)  # fmt: skip
WINDOWS = dataclasses.replace(QWEN2, n_layers=4, sliding_window=5, attention_pattern="sf")
GEMMA = dataclasses.replace(
    QWEN3, n_layers=3, activation="gelu_tanh", norm_plus_one=True, post_norms=True, scale_embedding=True,
    attention_scale=0.3, attention_softcap=0.5, logit_softcap=0.3, sliding_window=5, attention_pattern="ssf",
    rope_local_theta=30.0, rope_type="linear", rope_factor=4.0,
)  # fmt: skip
CONFIGS = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA, "gpt2": GPT2}


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to run a model: its config, the mesh's sizes, and the settings of `Parallel`."""

    config: ModelConfig
    tp: int = 1
    dp: int = 1
    codec: str | None = None
    sequence_parallel: bool = False
    remat: str = "none"
    dtype: type = jnp.float32
    chains: int = 1
    loss_chunk: int | None = 20
    batch: int = 8
    length: int = 16
    exponents: tuple[int, int] = (UNCALIBRATED, UNCALIBRATED)
    ranks_per_host: int | None = None
    between_hosts: str | None = None
    end_token: int | None = None

    @functools.cached_property
    def mesh(self):
        return make_mesh(dp=self.dp, tp=self.tp)

    @property
    def par(self) -> Parallel:
        hosts = {"ranks_per_host": self.ranks_per_host, "between_hosts": self.between_hosts}
        compression = Compression(self.codec, min_bytes=0, **hosts) if self.codec else None
        plan = Plan({"*": compression}).resolve(decoder.site_names(self.config, self.tp))
        return Parallel(
            plan=plan, sequence_parallel=self.sequence_parallel, remat=self.remat, dtype=self.dtype,
            chains=self.chains, loss_chunk=self.loss_chunk, end_token=self.end_token,
        )  # fmt: skip

    def params(self, seed: int = 0):
        """Parameters of global sizes on the mesh: the same for every tp, padding of the vocabulary in zeros.

        Biases and norm scales are random too, so that all of them matter.
        """
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        return jax.device_put(_host_params(self.config, self.tp, seed), shardings)

    @property
    def specs(self):
        return decoder.param_specs(self.config, self.tp)

    def batch_arrays(self, seed: int = 0):
        """(tokens, targets, weights) of the global batch; some weights are 0."""
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, self.config.vocab_size, (self.batch, self.length + 1), np.int32)
        weights = (rng.random((self.batch, self.length)) < 0.9).astype(np.float32)
        if self.end_token is not None:  # documents of some tokens each
            tokens[rng.random(tokens.shape) < 0.2] = self.end_token
        return tokens[:, :-1], tokens[:, 1:], weights

    def state(self):
        """Site scales: the same exponents at every site, slots of zeros."""
        layers = self.config.n_layers
        make = lambda lead: SiteScales(
            np.broadcast_to(np.array(self.exponents, np.int32), (*lead, 2)), np.zeros((*lead, 2, 1), np.float32)
        )
        names = decoder.site_names(self.config, self.tp)
        return {name: make((layers,) if name.startswith("layers/") else ()) for name in names}

    def value_and_grad(self):
        """jitted (params, tokens, targets, weights, exponents of every site) -> (mean loss, gradients of global sizes,
        amax of every site)."""
        config, par, slots = self.config, self.par, {name: scales.slot for name, scales in self.state().items()}

        def step(params, tokens, targets, weights, exponents):
            params = jax.tree.map(lambda p: lax.pcast(p, "dp", to="varying"), params)
            total = lax.psum(jnp.sum(weights), "dp")
            varying = lax.pcast(jax.tree.map(jnp.asarray, slots), ("dp", "pp", "tp"), to="varying")

            def loss(params, slots):
                scales = {name: SiteScales(exponents[name], slots[name]) for name in slots}
                nll, _ = decoder.loss(params, tokens, targets, weights, config, par, scales)
                return nll / total

            value, (grads, amax) = jax.value_and_grad(loss, argnums=(0, 1))(params, varying)
            grads = jax.tree.map(lambda g: lax.psum(g, "dp"), grads)
            return lax.psum(value, "dp"), grads, jax.tree.map(lambda a: lax.pmax(a, ("dp", "pp", "tp")), amax)

        in_specs = (self.specs, P("dp"), P("dp"), P("dp"), P())
        return jax.jit(jax.shard_map(step, mesh=self.mesh, in_specs=in_specs, out_specs=(P(), self.specs, P())))

    def arguments(self):
        """Arguments of `value_and_grad`."""
        return self.params(), *self.batch_arrays(), {name: scales.exponents for name, scales in self.state().items()}

    def outputs(self):
        """Outputs of `value_and_grad` on the devices."""
        return self.compiled()[0](*self.arguments())

    def gradients(self):
        """(loss, gradients as numpy by path, vocabulary padding cut off, amax by site)."""
        loss, grads, amax = self.outputs()
        return float(loss), by_path(unpadded(grads, self.config)), jax.tree.map(np.asarray, amax)

    def compiled(self):
        """(the compiled value_and_grad, its site table): made once for equal runs, whatever their exponents."""
        return _compiled(dataclasses.replace(self, exponents=Run.exponents))

    def logits(self, params=None, tokens=None):
        tokens = self.batch_arrays()[0] if tokens is None else tokens
        return np.asarray(_logits(self)(self.params() if params is None else params, tokens))


@functools.cache
def _host_params(config: ModelConfig, tp: int, seed: int):
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0), tp))
    unpadded_sizes = {"embed/table": (config.vocab_size, config.d_model),
                      "head/kernel": (config.d_model, config.vocab_size)}  # fmt: skip

    def leaf(path, shape):
        name = "/".join(key.key for key in path)
        size = unpadded_sizes.get(name, shape.shape)
        normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(size, np.float32)
        values = np.zeros(shape.shape, np.float32)
        values[tuple(map(slice, size))] = (
            0.1 * normal + name.endswith("scale")
            if name.endswith(("bias", "scale"))
            else normal * config.init_std / (np.sqrt(2 * config.n_layers) if "/out/" in name or "/down/" in name else 1)
        )
        return values

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.cache
def _compiled(run: Run):
    with comm_log.record() as table:
        lowered = run.value_and_grad().lower(*run.arguments())
    return lowered.compile(), table


@functools.cache
def _logits(run: Run):
    call = lambda params, tokens: decoder.logits(params, tokens, run.config, run.par, {})
    return jax.jit(jax.shard_map(call, mesh=run.mesh, in_specs=(run.specs, P("dp")), out_specs=P("dp")))


def unpadded(params, config: ModelConfig):
    """The tree without the rows and columns that pad the vocabulary to the mesh."""
    params = jax.tree.map(np.asarray, params)
    params["embed"]["table"] = params["embed"]["table"][: config.vocab_size]
    if "head" in params:
        params["head"]["kernel"] = params["head"]["kernel"][:, : config.vocab_size]
    return params


def by_path(tree) -> dict[str, np.ndarray]:
    return {"/".join(k.key for k in path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def compare_replicas(values) -> int:
    """Asserts that devices which should hold the same do, to the bit. Returns how many shards were compared."""
    compared = 0
    for leaf in jax.tree.leaves(values):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            expected = first.setdefault(str(shard.index), data)
            assert expected.tobytes() == data.tobytes()
            compared += expected is not data
    return compared


def assert_gradients_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], *, exact: bool) -> None:
    """Leaf by leaf. Exact: ||g - ref|| <= 1e-5 max(||ref||, 1e-4 global norm). With an 8-bit codec: relative error <=
    15 % and norm ratio within 5 % for leaves above 1e-2 of the global norm."""
    assert got.keys() == want.keys()
    norm = np.linalg.norm
    whole = np.sqrt(sum(norm(leaf) ** 2 for leaf in want.values()))
    for path, reference in want.items():
        assert got[path].shape == reference.shape, path
        size, error = norm(reference), norm(got[path] - reference)
        if exact:
            assert error <= 1e-5 * max(size, 1e-4 * whole), f"{path}: error {error:.2e}, norm {size:.2e}"
        elif size > 1e-2 * whole:
            assert error <= 0.15 * size, f"{path}: error {error / size:.1%}"
            ratio = norm(got[path]) / size
            assert abs(ratio - 1) <= 0.05, f"{path}: norm ratio {ratio:.3f}"


@functools.cache
def reference_gradients(config: ModelConfig, end_token: int | None = None):
    loss, gradients, _ = Run(config, end_token=end_token).gradients()
    return loss, gradients


def check_decoder(run: Run):
    """Loss and gradients of a run against those of the model on one device; returns the amax slots'."""
    loss, gradients, amax = run.gradients()
    want_loss, want = reference_gradients(run.config, run.end_token)
    if run.codec is None:
        np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    else:
        np.testing.assert_allclose(loss, want_loss, rtol=2e-3)
    assert_gradients_close(gradients, want, exact=run.codec is None)
    return amax
