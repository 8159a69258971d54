"""Training steps that know nothing of taco_jax, each built as its own package builds it, for bench_dropin.py.

A program is a function of a `Size` that returns a `Client`; `PROGRAMS` has all by name. They are tensor-parallel over
all devices. maxtext needs `pip install '.[dropin-test]'` and Python 3.12 or newer, tunix `pip install google-tunix`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.config import ConfigError

# Small enough for the mode of the activations' mean, whose curvature grows with the width of the MLP.
STACK_LEARNING_RATE = 1e-8
TUNIX_LEARNING_RATE = 3e-5


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a program; the defaults are Qwen2.5-7B's, with fewer layers and a smaller vocabulary."""

    layers: int = 6
    width: int = 3584
    hidden: int = 18944
    heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    vocabulary: int = 32000
    tokens: int = 16384
    sequence: int = 2048
    steps: int = 12  # of which the learning rate's schedule is made, where there is one


class Client(NamedTuple):
    """A program as its trainer has it.

    step: jitted, (state, batch) -> (state, metrics); it takes the state's memory over.
    loss: of its metrics.
    axis: the mesh axis whose messages are compressed.
    scope: returns the contexts in which its trainer traces the step.
    """

    step: Any
    state: Any
    batch: Any
    loss: Callable[[Any], jax.Array]
    axis: str
    scope: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def stack(size: Size) -> Client:
    """MLP layers under scan and remat: plain jit, NamedSharding, the compiler's own sums. Descent on its output."""
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",), axis_types=(AxisType.Auto,))
    sharding = lambda *spec: NamedSharding(mesh, P(*spec))
    constrain = lambda x, *spec: jax.lax.with_sharding_constraint(x, sharding(*spec))

    def layer(x_TD, weights):
        up_DF, down_FD = weights
        h_TF = constrain(jax.nn.gelu(x_TD @ up_DF), None, "tensor")
        return x_TD + constrain(h_TF @ down_FD, None, None), None

    def loss(weights, x_TD):
        y_TD, _ = jax.lax.scan(jax.checkpoint(layer), x_TD, weights)
        return 0.5 * jnp.mean(jnp.sum(jnp.square(y_TD.astype(jnp.float32)), axis=-1))

    def step(weights, x_TD):
        value, gradients = jax.value_and_grad(loss)(weights, x_TD)
        descend = lambda w, g: (w.astype(jnp.float32) - STACK_LEARNING_RATE * g.astype(jnp.float32)).astype(w.dtype)
        return jax.tree.map(descend, weights, gradients), value

    shardings = sharding(None, None, "tensor"), sharding(None, "tensor", None)
    layers, width, hidden = size.layers, size.width, size.hidden

    def init(key):
        keys = jax.random.split(key, 3)
        normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
        weights = normal(keys[0], layers, width, hidden) * width**-0.5, normal(keys[1], layers, hidden, width)
        return (weights[0], weights[1] * hidden**-0.5), normal(keys[2], size.tokens, width)

    weights, x_TD = jax.jit(init, out_shardings=(shardings, sharding()))(jax.random.key(0))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, sharding()))
    return Client(jitted, weights, x_TD, lambda value: value / size.width, "tensor")


def maxtext(size: Size) -> Client:
    """MaxText's own step of its own trainer, a Llama of this size, with its defaults; its synthetic data."""
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # read when it is imported
    if importlib.util.find_spec("maxtext") is None:
        raise ConfigError("--programs=maxtext: is not installed; pip install '.[dropin-test]'")
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train
    from maxtext.utils import sharding, train_utils

    with tempfile.TemporaryDirectory() as folder:
        config, recorder = train.initialize(["", *maxtext_settings(size, folder)])
        _, _, shardings, _, mesh, _, _, loader, _, _, state = train_utils.setup_train_loop(config, recorder)
    graph, state = nnx.split(state)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train.train_step, train.eval_step, None, of_params
    )

    @contextlib.contextmanager
    def scope():
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            yield

    loss = lambda metrics: metrics["scalar"]["learning/loss"]
    return Client(step, state, loader.load_next_batch(), loss, "tensor", scope)


def maxtext_settings(size: Size, folder: str) -> list[str]:
    """Its arguments: the base configuration, the sizes, and neither network nor caches nor other services."""
    base = Path(importlib.util.find_spec("maxtext").origin).parent / "configs" / "base.yml"
    devices = len(jax.devices())
    values = {
        "run_name": "run", "base_output_directory": folder, "dataset_type": "synthetic",
        "hardware": "cpu" if jax.default_backend() == "cpu" else "gpu", "steps": size.steps, "attention": "dot_product",
        "jax_cache_dir": "", "skip_jax_distributed_system": "true", "enable_checkpointing": "false",
        "async_checkpointing": "false", "enable_goodput_recording": "false", "monitor_goodput": "false",
        "ici_tensor_parallelism": devices, "base_num_decoder_layers": size.layers, "base_emb_dim": size.width,
        "base_mlp_dim": size.hidden, "base_num_query_heads": size.heads, "base_num_kv_heads": size.kv_heads,
        "head_dim": size.head_dim, "vocab_size": size.vocabulary, "max_target_length": size.sequence,
        "per_device_batch_size": size.tokens / size.sequence / devices,
    }  # fmt: skip
    return [str(base), *(f"{key}={value}" for key, value in values.items())]


def tunix(size: Size) -> Client:
    """The step of google-tunix's own trainer, a Qwen3 of this size in bfloat16, sharded by its rules; random tokens."""
    if importlib.util.find_spec("tunix") is None:
        raise ConfigError("--programs=tunix: is not installed; pip install google-tunix")
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer, utils

    mesh = jax.make_mesh((1, len(jax.devices())), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    replicated = NamedSharding(mesh, P())
    config = qwen3.ModelConfig(
        num_layers=size.layers, vocab_size=size.vocabulary, embed_dim=size.width, hidden_dim=size.hidden,
        num_heads=size.heads, num_kv_heads=size.kv_heads, head_dim=size.head_dim, norm_eps=1e-6, rope_theta=1_000_000,
        dtype=jnp.bfloat16, remat_config=qwen3.RematConfig.DECODER,
    )  # fmt: skip

    @nnx.jit
    def init():
        model, rngs = qwen3.Qwen3(config, rngs=nnx.Rngs(params=0)), nnx.Rngs(1)
        for layer in model.layers:  # zeros, for weights that are read
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                shape = linear.kernel.shape
                linear.kernel.value = jax.random.normal(rngs(), shape) * shape[0] ** -0.5
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    def inputs(example):
        mask = example.input_mask
        return {
            "input_tokens": example.input_tokens, "input_mask": mask,
            "positions": utils.build_positions_from_mask(mask), "attention_mask": utils.make_causal_attn_mask(mask),
        }  # fmt: skip

    with mesh:
        settings = peft_trainer.TrainingConfig(eval_every_n_steps=size.steps, max_steps=size.steps)
        trainer = peft_trainer.PeftTrainer(init(), optax.adamw(TUNIX_LEARNING_RATE), settings)
        trainer = trainer.with_gen_model_input_fn(inputs)
        trainer.jit_train_and_eval_step()  # shards the optimiser's state
    graph, state = nnx.split((trainer.model, trainer.optimizer))
    of_mesh = lambda x: x.sharding if isinstance(x.sharding, NamedSharding) else replicated
    shardings = jax.tree.map(of_mesh, state)
    state = jax.device_put(state, shardings)
    own_step = trainer.create_train_step_fn()

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, _, _ = own_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    shape = (size.tokens // size.sequence, size.sequence)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, size.vocabulary, jnp.int32)
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=jnp.ones(shape, bool))
    batch = jax.device_put(batch, replicated)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated))
    return Client(jitted, state, batch, lambda loss: loss, "tp", lambda: mesh)


PROGRAMS: dict[str, Callable[[Size], Client]] = {"stack": stack, "maxtext": maxtext, "tunix": tunix}
