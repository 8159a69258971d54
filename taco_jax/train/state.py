"""The state of a run: what a step reads and writes, where it lies on the mesh, and a new one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import new_scale_state
from taco_jax.config import TrainConfig, pipeline_schedule
from taco_jax.models import decoder, lora
from taco_jax.pipeline import layout
from taco_jax.train import optim
from taco_jax.train.data_parallel import DataParallel
from taco_jax.train.muon import WholeMatrices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a step reads and writes.

    step: int32, steps taken, skipped ones included (it is the data position in batches). params: float32. scales: site
    name -> ScaleState. skipped, skipped_in_a_row: int32 counts of non-finite steps, which change nothing else. copy:
    the parameters that the model computes with, where params are masters of which each rank has a share; else None.
    base: the model's parameters where params are adapters alone (`taco_jax.models.lora`), which no step changes; else
    None.
    """

    step: Any
    params: Any
    opt_state: Any
    scales: Any
    skipped: Any
    skipped_in_a_row: Any
    copy: Any = None
    base: Any = None

    @property
    def weights(self) -> Any:
        """Returns the trained parameters, or adapters, that the model computes with."""
        return self.params if self.copy is None else self.copy


class StateFactory:
    """New states of one configuration on one mesh, and what their form follows from.

    shapes: a TrainState of ShapeDtypeStructs with shardings. param_specs, base_specs: where the trained parameters and
    the model under adapters lie ({} without adapters). site_shapes: {compressed site: the shape of its scales}. chunks:
    of a stage's layers. optimizer: of optax; learning_rate: step -> its rate.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, plan: Mapping[str, Compression | None]):
        """plan: the Compression of every site by the configuration, None where it is exact."""
        self.config, self.mesh = config, mesh
        self.adapters = lora.Adapters.of(config.lora, config.model)
        schedule = pipeline_schedule(config)
        self.chunks = layout.chunks_of(schedule)
        specs = decoder.param_specs(config.model, config.mesh.tp)
        self.base_specs = {} if self.adapters is None else layout.specs(specs, schedule)
        specs = specs if self.adapters is None else self.adapters.specs(specs)
        self.param_specs = layout.specs(specs, schedule)
        self.site_shapes = {
            site: (config.model.n_layers,) if site.startswith("layers/") else ()
            for site, compression in plan.items()
            if compression is not None
        }
        shapes = jax.eval_shape(self._new_params, jax.random.key(0))
        self.data_parallel = DataParallel(config, mesh, self.param_specs, shapes)
        stacked_dims = 1 if self.chunks == 1 else 2
        orthogonal = WholeMatrices(self.data_parallel, stacked_dims)
        self.optimizer, self.learning_rate = optim.make(config.optimizer, config.steps, stacked_dims, orthogonal)
        self.shapes = self._abstract_state()

    def init(self, key: jax.Array) -> TrainState:
        """A new state on the mesh; the values do not depend on the mesh."""
        return self._jitted_init(key)

    # jax.jit finds what it has compiled by the function, and a bound method is another object every time.
    @functools.cached_property
    def _jitted_init(self):
        return jax.jit(self._new_state, out_shardings=jax.tree.map(lambda a: a.sharding, self.shapes))

    def _new_params(self, key) -> Any:
        return self._new_model(key) if self.adapters is None else self._new_adapters(key)

    def _new_model(self, key) -> Any:
        params = decoder.init_params(self.config.model, key, self.config.mesh.tp)
        return jax.tree.map(layout.split(self.chunks), params, layout.in_layers(params))

    def _new_adapters(self, key) -> Any:
        params = self.adapters.init(self.config.model, jax.random.fold_in(key, 1))
        return jax.tree.map(layout.split(self.chunks), params, layout.in_layers(params))

    def _new_state(self, key) -> TrainState:
        dp, params, copy = self.data_parallel, self._new_params(key), None
        masters = dp.own(params) if dp.sharded else params
        if dp.has_copy:
            params, copy = masters, jax.tree.map(lambda p: p.astype(dp.copy_dtype), params)
        zero = np.int32(0)
        return TrainState(
            zero,
            params,
            self.optimizer.init(masters),
            self._new_scales(),
            skipped=zero,
            skipped_in_a_row=zero,
            copy=copy,
            base=None if self.adapters is None else self._new_model(key),
        )

    def _new_scales(self):
        history = self.config.compression.history
        scales = {site: new_scale_state(shape, history) for site, shape in self.site_shapes.items()}
        return jax.tree.map(jnp.asarray, scales)

    def init_scales(self):
        """The `scales` of a new state, on the mesh."""
        return jax.jit(self._new_scales, out_shardings=jax.tree.map(lambda a: a.sharding, self.shapes.scales))()

    def _abstract_state(self) -> TrainState:
        shapes = jax.eval_shape(self._new_state, jax.random.key(0))
        replicated = lambda tree: jax.tree.map(lambda _: P(), tree)
        dp = self.data_parallel
        specs = TrainState(
            P(),
            dp.master_specs,
            optim.map_params(
                lambda _, spec: spec,
                shapes.opt_state,
                dp.share_specs if dp.sharded else self.param_specs,
                other=lambda _: P(),
            ),
            replicated(shapes.scales),
            skipped=P(),
            skipped_in_a_row=P(),
            copy=self.param_specs if dp.has_copy else None,
            base=self.base_specs or None,
        )
        place = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(self.mesh, spec))
        return jax.tree.map(place, shapes, specs)
