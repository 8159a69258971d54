"""Small models of Google DeepMind's gemma package, trained by Kauldron. They know nothing of compressed sums.

python gemma_program.py train decoder fsdp DEVICES STEPS EVERY             checkpoints every so many steps, 0 for none
python gemma_program.py gradients encoder-decoder tensor DEVICES PLAN...
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gemma import gm
from gemma.research.t5gemma import modules, t5gemma
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kauldron import kd
from kauldron.train import metric_writer

Entropy = kd.losses.SoftmaxCrossEntropyWithIntLabels
VOCABULARY, LENGTH, BATCH = 512, 64, 8
SIZES = dict(
    num_embed=VOCABULARY, embed_dim=128, hidden_dim=256, num_heads=4, num_kv_heads=4, head_dim=32,
    final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True,
)  # fmt: skip
# The dim of a weight that tensor parallelism cuts: vocabulary, heads or hidden features.
CUT = {
    "input_embedding": 0, "qkv_einsum": 1, "q_einsum": 0, "kv_einsum": 1, "attn_vec_einsum": 0, "gating_einsum": 1,
    "linear": 0,
}  # fmt: skip


class SmallGemma(gm.nn.Transformer):
    """Gemma 3 in small: local and global attention, norms of queries and keys."""

    config: gm.nn.config.TransformerConfig = gm.nn.config.TransformerConfig(
        attention_types=(gm.nn.AttentionType.LOCAL_SLIDING, gm.nn.AttentionType.GLOBAL),
        sliding_window_size=16,
        use_qk_norm=True,
        **SIZES,
    )


def encoder_decoder():
    """T5Gemma in small."""
    sizes = dict(num_layers=2, attention_types=(gm.nn.AttentionType.GLOBAL,) * 2, kv_embed_dim=128, **SIZES)
    config = t5gemma.T5GemmaConfig(
        encoder_config=modules.TransformerConfig(bidirectional=True, **sizes),
        decoder_config=modules.TransformerConfig(enable_cross_attention=True, **sizes),
    )
    return config.make(dtype=jnp.float32, input_tokens="batch.source", target_tokens="batch.tokens")


MODELS = {
    "decoder": lambda: SmallGemma(dtype=jnp.float32, tokens="batch.tokens"),
    "encoder-decoder": encoder_decoder,
}


class Counting:
    """Counts in steps of one to eight, modulo the vocabulary; a source, the tokens after it and what comes next."""

    def __len__(self):
        return 1000

    def __getitem__(self, n):
        random = np.random.default_rng(int(n))
        start, stride = random.integers(1, VOCABULARY), random.integers(1, 9)
        tokens = ((start + stride * np.arange(2 * LENGTH + 1)) % (VOCABULARY - 1) + 1).astype(np.int32)
        return {"source": tokens[:LENGTH], "tokens": tokens[LENGTH:-1], "targets": tokens[LENGTH + 1 :, None]}


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class LossWriter(metric_writer.NoopWriter):
    """Appends the loss of every step to losses.txt."""

    def write_step_metrics(self, *, aux, **_):
        with open("losses.txt", "a") as file:
            print(float(aux.compute(flatten=True).loss_values["losses/total"]), file=file)


class Wider(kd.ckpts.InitTransform):
    """Weights of the size that suits this width: the package's own suits models of thousands of features."""

    def transform(self, state):
        return state.replace(params=jax.tree.map(lambda w: w * 8 if w.ndim > 1 else w, state.params))


def fsdp(devices: int):
    """Kauldron's own: every weight is cut over all devices."""
    return kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0))


def tensor(devices: int):
    """The weights' heads, hidden features and vocabulary over `tensor`, the batch over `data`."""
    axes = (jax.device_count() // devices, devices)
    mesh = jax.make_mesh(axes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def rule(path, _):
        (dim,) = [CUT[name.key] for name in path if name.key in CUT] or [None]
        return NamedSharding(mesh, PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "tensor"))

    return kd.sharding.ShardingStrategy(
        batch=NamedSharding(mesh, PartitionSpec("data")),
        params=lambda tree: jax.tree_util.tree_map_with_path(rule, tree),
    )


def make_trainer(model: str, sharding, steps: int, every: int) -> kd.train.Trainer:
    """every: of a checkpoint; 0 writes and reads none."""
    return kd.train.Trainer(
        workdir=Path.cwd(),
        train_ds=kd.data.py.DataSource(data_source=Counting(), shuffle=True, batch_size=BATCH, num_workers=0),
        model=MODELS[model](),
        optimizer=optax.adamw(1e-3),
        sharding=sharding,
        train_losses={"entropy": Entropy(logits="preds.logits", labels="batch.targets")},
        init_transform=Wider(),
        num_train_steps=steps,
        stop_after_steps=steps,
        log_metrics_every=1,
        log_summaries_every=1,
        writer=LossWriter(),
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=every) if every else kd.ckpts.NoopCheckpointer(),
    )


def gradients(trainer: kd.train.Trainer, plan: list[str]) -> None:
    from trainers import compare_gradients

    state = trainer.init_state()
    batch = kd.sharding.device_put(next(iter(trainer.train_ds)), trainer.sharding.batch)
    rngs = trainer.trainstep.rng_streams.train_rngs(0)

    def loss(params, batch):
        context = kd.train.Context.from_state_and_batch(state=state.replace(params=params), batch=batch)
        losses = trainer.trainstep.aux.losses
        return kd.train.forward_with_loss(context, model=trainer.model, losses=losses, rngs=rngs, is_training=True)[0]

    compare_gradients(jax.jit(jax.value_and_grad(loss)), (state.params, batch), plan)


if __name__ == "__main__":
    what, model, strategy, devices, *rest = sys.argv[1:]
    sharding = {"fsdp": fsdp, "tensor": tensor}[strategy](int(devices))
    if what == "train":
        make_trainer(model, sharding, *map(int, rest)).train()
        Path("losses.json").write_text(json.dumps([float(line) for line in Path("losses.txt").read_text().split()]))
    else:
        gradients(make_trainer(model, sharding, 1, 0), rest)
