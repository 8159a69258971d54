"""The training step: one jitted program that donates its state.

A full-manual shard_map over (dp, pp, tp) holds forward pass, pipeline and gradient, others the messages of data
parallelism (`taco_jax.train.data_parallel`); around them, in the same program, the optimiser, the site scales and the
decision to keep a step. Gradients over dp are summed in float32: the float32 parameters are made varying over dp before
they are cast, so that autodiff leaves that sum to us and accumulated microbatches need it once.

Dim letters: A microbatches, B sequences, L tokens, K slot width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax import pipeline
from taco_jax.codec import STATS, UNCALIBRATED
from taco_jax.collectives import comm_log
from taco_jax.collectives.topology import ranks_per_host
from taco_jax.compression import tuned
from taco_jax.compression.site_scales import SiteScales, merge_uses, update_scale_state
from taco_jax.config import (
    ConfigError,
    TrainConfig,
    chains,
    overlap,
    pipeline_schedule,
    remat,
    sequence_parallel,
    with_codecs,
)
from taco_jax.data.sources import end_token
from taco_jax.mesh import AXES
from taco_jax.models import decoder, lora
from taco_jax.models.attention import implementation, why_not_cudnn
from taco_jax.models.run_config import Parallel
from taco_jax.tensor_parallel import to_varying
from taco_jax.train import layered_backward, links
from taco_jax.train.base import Base
from taco_jax.train.site_plan import in_other_codecs, resolve_plan
from taco_jax.train.site_stats import over_devices
from taco_jax.train.state import StateFactory, TrainState
from taco_jax.train.state_layout import Stored


class Program:
    """The compiled programs of one configuration on one mesh.

    step(state, batch) -> (state, metrics); step_with_stats also measures every site; eval_step(state, batch) -> (sum of
    the negative log-likelihoods in nats, number of predicted tokens). A batch is {"tokens": int32[B, L + 1]}, sharded
    P("dp"); eval_step also takes "weights" float32[B, L] (0 leaves a token out).

    metrics: float32 scalars loss (nats per token), grad_norm, learning_rate, skipped, skipped_in_a_row; with statistics
    also "stats", site name -> float32[(layers,) 2, len(codec.STATS)], the sums over devices (the maximum for amax).
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, codecs: Mapping[str, str] | None = None):
        """codecs: of ways "SITE/DIRECTION" that are not in the config's (`in_other_codecs`). The state keeps its form:
        sites that became exact keep their scales."""
        self.config, self.mesh = config, mesh
        self.batch_sharding = NamedSharding(mesh, P("dp"))
        self.ranks_per_host = ranks_per_host(mesh, "tp", config.mesh.devices_per_host)
        plan = links.choose(resolve_plan(config, self.ranks_per_host), config, mesh)
        self.parallel = Parallel(
            plan=in_other_codecs(plan, codecs or {}),
            sequence_parallel=sequence_parallel(config)[0],
            remat=remat(config)[0],
            chains=chains(config, mesh.devices.flat[0])[0],
            dtype=jnp.dtype(config.compute_dtype),
            attention_implementation=_attention(config, mesh),
            end_token=end_token(config),
            loss_chunk=config.loss_chunk,
            precision="highest" if config.compute_dtype == "float32" else None,
            adapter_scale=1.0 if config.lora.rank is None else config.lora.scale,
            frozen=config.lora.rank is not None,
        )
        self._check_codecs()
        self.schedule_of_stages = pipeline_schedule(config)
        # The axes over which parameters that are whole there have gradients of their own on every rank.
        self._axes = ("dp",) if self.schedule_of_stages is None else ("dp", pipeline.AXIS)
        self.overlapped = overlap(config)[0]
        self._states = StateFactory(config, mesh, plan)
        self.state_shapes, self.data_parallel = self._states.shapes, self._states.data_parallel
        self.adapters, self._param_specs = self._states.adapters, self._states.param_specs
        chunks = self._states.chunks
        self.stored = Stored(self.data_parallel, dataclasses.replace(self.state_shapes, base=None), chunks)
        self.base = None if self.adapters is None else Base(self.state_shapes.base, chunks, mesh)

    @property
    def codecs(self) -> list[str]:
        """The codecs of all sites and directions."""
        return self._codecs_of(site for site, _ in self.parallel.plan)

    @property
    def codecs_of_sums(self) -> list[str]:
        """Codecs of all tensor-parallel sites (pipeline sends excluded)."""
        return self._codecs_of(site for site, _ in self.parallel.plan if site != pipeline.SITE)

    def _codecs_of(self, names: Iterable[str]) -> list[str]:
        compressions = [c for c in map(self.parallel.compression, names) if c is not None]
        return sorted({codec.name for c in compressions for codec in c.codecs})

    def _check_codecs(self) -> None:
        """Raises ConfigError for a file of tuned values that the step could not read."""
        device = self.mesh.devices.flat[0]
        for codec in self.codecs_of_sums:
            try:
                tuned.find(codec, self.config.mesh.tp, device)
            except tuned.TunedFileError as error:
                raise ConfigError(f"compression: {error}") from error

    def init(self, key: jax.Array) -> TrainState:
        """A new state on the mesh; the values do not depend on the mesh."""
        return self._states.init(key)

    def init_scales(self):
        """The `scales` of a new state, on the mesh."""
        return self._states.init_scales()

    @functools.cached_property
    def step(self):
        """The compiled step; compiling it also records `table`."""
        return self._compile(self.lowered)

    @functools.cached_property
    def step_with_stats(self):
        return self._compile(self.lowered_with_stats)

    @functools.cached_property
    def measure(self):
        """The compiled measurement of every site: measure(state, batch) -> `metrics["stats"]`; it changes nothing."""
        measures = lambda state, batch: self._partial_gradients(state, batch["tokens"], True)[2]
        jitted = jax.jit(measures, out_shardings=NamedSharding(self.mesh, P()))
        return self._compile(jitted.lower(self.state_shapes, self.batch_shapes))

    @functools.cached_property
    def table(self) -> comm_log.Table:
        """Every communication of `step`."""
        return self._traced[1]

    @property
    def lowered(self):
        """The step traced and lowered, not compiled."""
        return self._traced[0]

    @functools.cached_property
    def _traced(self):
        with comm_log.record() as table:
            lowered = self._jitted(with_stats=False).lower(self.state_shapes, self.batch_shapes)
        return lowered, table

    @functools.cached_property
    def lowered_with_stats(self):
        """The step that also measures, traced and lowered, not compiled."""
        return self._jitted(with_stats=True).lower(self.state_shapes, self.batch_shapes)

    @property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.config.global_batch, self.config.data.sequence_length + 1)
        return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)}

    def _jitted(self, with_stats: bool):
        shardings = jax.tree.map(lambda a: a.sharding, self.state_shapes)
        function = functools.partial(self._step, with_stats=with_stats)
        return jax.jit(function, donate_argnums=0, out_shardings=(shardings, NamedSharding(self.mesh, P())))

    def _compile(self, lowered):
        platform = self.mesh.devices.flat[0].platform
        options = links.compiler_options(self.parallel.plan, self.parallel.chains, platform, self.overlapped)
        return lowered.compile(compiler_options=options)

    @functools.cached_property
    def eval_step(self):
        options = links.compiler_options(self.parallel.plan, 1, self.mesh.devices.flat[0].platform)
        return jax.jit(self._eval, compiler_options=options)

    def _step(self, state: TrainState, batch, *, with_stats: bool):
        loss, grads, measures = self._gradients(state, batch["tokens"], with_stats)
        grad_norm = _global_norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        old = self.data_parallel.masters(state.params)
        updates, opt_state = self._states.optimizer.update(grads, state.opt_state, old)
        masters = jax.tree.map(lambda p, u: p + u, old, updates)
        scales = {site: update_scale_state(state.scales[site], measures[site][..., 0]) for site in state.scales}
        keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
        bad = 1 - good.astype(jnp.int32)
        params, copy = self.data_parallel.spread(keep(masters, old), state.copy)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=keep(opt_state, state.opt_state),
            scales=keep(scales, state.scales),
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + 1) * bad,
            # A difference may be sent though no master has moved.
            copy=keep(copy, state.copy),
            base=state.base,
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": self._states.learning_rate(state.step - state.skipped),
            "skipped": bad,
            "skipped_in_a_row": new.skipped_in_a_row,
        }
        metrics = {name: value.astype(jnp.float32) for name, value in metrics.items()}
        return new, metrics | ({"stats": measures} if with_stats else {})

    def _gradients(self, state: TrainState, tokens, with_stats: bool):
        """(loss, gradients as the optimiser takes them, measures of the sites) of a batch of tokens int32[B, L + 1]."""
        loss, partial, measures = self._partial_gradients(state, tokens, with_stats)
        return loss, self.data_parallel.reduce(partial), measures

    def _partial_gradients(self, state: TrainState, tokens, with_stats: bool):
        """(loss, each dp rank's gradients [dp, ...], measures of the sites) of a batch of tokens int32[B, L + 1].

        Gradients that were summed in the backward pass (`DataParallel.by_layer`) are as `reduce` leaves them.
        """
        config, width = self.config, len(STATS) if with_stats else 1
        predicted = tokens.shape[0] * (tokens.shape[1] - 1)
        exponents = self._exponents(state)

        def local(params, base, exponents, tokens_BL):
            params, base = (self._varying(tree) for tree in (params, base))
            shapes = self._states.site_shapes
            slots = {s: to_varying(jnp.zeros((*shape, 2, width)), AXES) for s, shape in shapes.items()}

            dp = self.data_parallel
            gradient = self._value_and_grad(base, exponents, predicted)
            if config.accumulation == 1:
                total, (grads, measures) = gradient(params, slots, tokens_BL)
            else:

                def microbatch(carry, tokens_BL):
                    part, (grads, measures) = gradient(params, slots, tokens_BL)
                    return jax.tree.map(jnp.add, carry, (part, grads)), measures

                zeros = to_varying(jnp.zeros(()), self._axes), jax.tree.map(jnp.zeros_like, params)
                tokens_ABL = tokens_BL.reshape(config.accumulation, -1, tokens_BL.shape[-1])
                with comm_log.repeat(config.accumulation):
                    (total, grads), measures = lax.scan(microbatch, zeros, tokens_ABL)
                measures = jax.tree.map(merge_uses, measures)
            if self.schedule_of_stages is not None:
                total, grads = pipeline.sum_over_stages(total, grads)
            grads = jax.tree.map(lambda g, summed: g if summed else g[None], grads, dp.by_layer)
            return _dp_sum("dp/loss", total), grads, over_devices(measures)

        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(self._param_specs, self._states.base_specs, P(), P("dp")),
            out_specs=(P(), self.data_parallel.partial_specs, P()),
        )
        return run(state.weights, state.base or {}, exponents, tokens)

    def _varying(self, params: Any) -> Any:
        return jax.tree.map(lambda p: to_varying(p.astype(jnp.float32), self._axes), params)

    def _value_and_grad(self, base, exponents, predicted: int):
        """f(params, slots, tokens int32[B, L + 1]) -> (part of the mean loss over `predicted` tokens, gradients)."""

        def loss(params, slots, tokens_BL):
            ones = jnp.ones(tokens_BL[:, 1:].shape)
            nll, _ = self._loss(lora.join(base, params), exponents, slots, tokens_BL, ones)
            return nll / predicted

        def of_stages(params, slots, tokens_BL):
            batch = tokens_BL[:, :-1], tokens_BL[:, 1:], jnp.ones(tokens_BL[:, 1:].shape)
            model = self.config.model, self.parallel, self.schedule_of_stages
            arguments = (params, slots, exponents, *batch, 1 / predicted, *model)
            return pipeline.value_and_grad(*arguments, base=base)

        def layer_by_layer(params, slots, tokens_BL):
            dp = self.data_parallel
            own = {"config": self.config.model, "par": self.parallel, "by_layer": dp.by_layer, "sums": dp.layer_sums}
            return layered_backward.value_and_grad(params, slots, exponents, tokens_BL, predicted, **own)

        if self.schedule_of_stages is not None:
            return of_stages
        return layer_by_layer if self.overlapped else jax.value_and_grad(loss, argnums=(0, 1))

    def _eval(self, state: TrainState, batch):
        tokens = batch["tokens"]
        weights = batch.get("weights", jnp.ones(tokens[:, 1:].shape))

        def local(params, base, exponents, tokens_BL, weights_BL):
            params = lora.join(self._varying(base), self._varying(params))

            def microbatch(carry, batch):
                result = self._loss(params, exponents, {}, *batch)
                return jax.tree.map(jnp.add, carry, result), None

            # In the microbatches of a step: what can be trained can be validated.
            cut = lambda a: a.reshape(self.config.accumulation, -1, a.shape[-1])
            zero = to_varying(jnp.zeros(()), self._axes)
            (nll, count), _ = lax.scan(microbatch, (zero, zero), (cut(tokens_BL), cut(weights_BL)))
            return lax.psum(nll, self._axes), lax.psum(count, self._axes)

        specs = (self._param_specs, self._states.base_specs, P(), P("dp"), P("dp"))
        run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=P())
        return run(state.weights, state.base or {}, self._exponents(state), tokens, weights)

    def _loss(self, params, exponents, slots, tokens_BL, weights_BL):
        """(sum of weighted nll in nats, sum of weights); of stages not to be differentiated."""
        scales = {site: SiteScales(exponents[site], slots.get(site)) for site in exponents}
        batch = tokens_BL[:, :-1], tokens_BL[:, 1:], to_varying(weights_BL, "dp")
        model = self.config.model, self.parallel, scales
        if self.schedule_of_stages is None:
            return decoder.loss(params, *batch, *model)
        return pipeline.evaluate(params, *batch, *model, self.schedule_of_stages)

    def _exponents(self, state: TrainState) -> dict[str, jax.Array]:
        calibrated = state.step >= self.config.compression.calibration_steps
        return {s: jnp.where(calibrated, scale.exponents, UNCALIBRATED) for s, scale in state.scales.items()}


def build(config: TrainConfig, mesh: Mesh, codecs: Mapping[str, str] | None = None) -> Program:
    """The programs of `config` on `mesh` (axes dp, pp, tp of the configured sizes). codecs: as of `Program`."""
    want = {"dp": config.mesh.dp, "pp": config.mesh.pp, "tp": config.mesh.tp}
    if dict(mesh.shape) != want:
        raise ConfigError(f"mesh: the config says {want}, the given mesh is {dict(mesh.shape)}")
    return Program(with_codecs(config), mesh, codecs)


def _attention(config: TrainConfig, mesh: Mesh) -> str:
    platform, dtype = mesh.devices.flat[0].platform, config.compute_dtype
    unfit = why_not_cudnn(config.model, config.data.document_mask)
    if config.attention_implementation == "cudnn" and unfit:
        raise ConfigError(f"attention_implementation='cudnn': cannot have {unfit}; use 'xla' or leave it out")
    if config.attention_implementation == "cudnn" and (platform != "gpu" or dtype == "float32"):
        raise ConfigError(
            f"attention_implementation='cudnn': needs a GPU and a 16-bit compute_dtype, this run has {platform} and "
            f"{dtype}; use 'xla' or leave it out"
        )
    if platform == "cpu" and dtype == "float16":
        raise ConfigError("compute_dtype='float16': JAX has no float16 attention on CPU; use 'bfloat16' or 'float32'")
    if config.attention_implementation is not None:
        return config.attention_implementation
    return "xla" if unfit else implementation(mesh.devices.flat[0], dtype, config.model.head_dim)


def _dp_sum(site: str, x):
    comm_log.exact(site, "backward", "psum", "dp", x)
    return lax.psum(x, "dp")


def _global_norm(grads) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
