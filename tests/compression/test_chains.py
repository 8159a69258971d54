"""Chains by themselves: two where the link is slow, and what makes them one."""

import dataclasses

import jax
import pytest

from pallas_kernels.nvlink import hardware
from taco_jax.compression import chains as rule
from taco_jax.compression import tuned
from taco_jax.compression.compression import Compression
from taco_jax.config import (
    CompressionConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
    chains,
    sequence_parallel,
)
from taco_jax.config.checks import check
from taco_jax.inference.settings import Settings

MODEL = ModelConfig(d_model=2048, n_layers=2, n_heads=16, d_mlp=4096, vocab_size=4096)
# A microbatch of 4 x 1,024 tokens: 8 MiB in each chain.
CONFIG = TrainConfig(
    model=MODEL, mesh=MeshConfig(tp=2), compression=CompressionConfig("int8h", "int8h"), global_batch=4,
    data=DataConfig(sequence_length=1024), remat="full",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Gpu:
    device_kind: str = "NVIDIA H200"
    platform: str = "gpu"
    compute_capability: str = "9.0"


@pytest.fixture(autouse=True)
def host_memory(monkeypatch):
    """GPUs whose messages go through host memory, with nothing tuned."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv(tuned.VARIABLE, "")


def of(**changes):
    compression = {k.removeprefix("c_"): changes.pop(k) for k in [*changes] if k.startswith("c_")}
    own = dataclasses.replace(CONFIG.compression, **compression)
    return chains(check(dataclasses.replace(CONFIG, compression=own, **changes)), Gpu())


def test_two_where_messages_go_through_host_memory():
    count, why = of()
    assert count == 2 and why.startswith("NCCL_P2P_DISABLE asks for a link without peer memory")
    assert chains(CONFIG)[0] == 2  # and before there is a device, so that kernels can be launched in order


def test_one_over_nvlink(monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    monkeypatch.setattr(hardware, "all_linked", lambda: True)
    assert of() == (1, "over NVLink they lose more in their products than they hide")
    monkeypatch.setattr(hardware, "all_linked", lambda: False)
    assert of()[0] == 2  # PCIe
    monkeypatch.setattr(hardware, "all_linked", lambda: None)
    assert chains(CONFIG, Gpu("NVIDIA A100 80GB PCIe"))[0] == 2 and chains(CONFIG, Gpu())[0] == 1


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"mesh": MeshConfig()}, "tp is 1"),
        ({"devices": "cpu:2"}, "on CPU nothing travels"),
        ({"mesh": MeshConfig(pp=2, tp=2), "global_batch": 8}, "stages have microbatches already"),
        ({"c_with_product": True}, "sums in the kernels of their products"),
        ({"c_backward_error_feedback": True}, "the gradients' sums of one chain"),
        ({"sequence_parallel": True}, "sequence parallelism is on"),
        ({"remat": "none", "data": DataConfig(sequence_length=2048)}, "sequence parallelism is on"),
        ({"global_batch": 3}, "2 do not divide the 3 sequences"),
        ({"data": DataConfig(sequence_length=256)}, "a chain's messages would have 2,097,152 bytes, below 4,194,304"),
        ({"c_min_bytes": 16 << 20}, "a chain's messages would have 8,388,608 bytes, below 16,777,216"),
    ],
)
def test_one_where_two_cannot_be_or_would_not_pay(changes, why):
    config = check(dataclasses.replace(CONFIG, **{k: v for k, v in changes.items() if not k.startswith("c_")}))
    own = {k.removeprefix("c_"): v for k, v in changes.items() if k.startswith("c_")}
    config = dataclasses.replace(config, compression=dataclasses.replace(config.compression, **own))
    device = None if "devices" in changes else Gpu()
    count, said = chains(config, device)
    assert count == 1 and said.startswith(why), said


def test_what_is_said_has_the_last_word(monkeypatch):
    assert of(chains=1) == (1, "as configured")
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    assert of(chains=4, c_with_product=False) == (4, "as configured")


def test_chains_by_themselves_are_no_reason_of_sequence_parallelism(monkeypatch):
    """Without a device they may be two where the run has one, as on a CPU."""
    remat = (False, "remat full leaves little memory to save")
    assert chains(CONFIG)[0] == 2 and sequence_parallel(CONFIG) == remat
    on, why = sequence_parallel(dataclasses.replace(CONFIG, chains=2))
    assert not on and why.startswith("chains put messages beside products")


def test_chains_stay_above_what_was_tuned(monkeypatch, tmp_path):
    file = tmp_path / "tuned.json"
    name = tuned.entry_name("NVIDIA H200", 2)
    rows = ((1 << 20, 1, "all_to_all"),)
    tuned.write(file, name, {"int8h": tuned.Tuned(12 << 20, rows)})
    monkeypatch.setenv(tuned.VARIABLE, str(file))
    assert of()[1] == "a chain's messages would have 8,388,608 bytes, below 12,582,912"
    assert rule.least_bytes([Compression("int4h"), None, Compression("none")], 2, Gpu()) == rule.MIN_CHAIN_BYTES


def test_prompts_follow_the_link():
    layout = lambda **o: Settings(2, Compression("int4h", error_feedback=True), **o).layout(
        MODEL, Gpu(), decoding=False
    )
    assert (layout().chains, layout().chain_bytes) == (2, rule.MIN_CHAIN_BYTES)
    assert tuple(layout().chains_of(MODEL, 1, 2048)) == (2, 1) and layout().chains_of(MODEL, 1, 1024).count == 1
    assert layout(chains=1).chains == 1
    assert Settings(1, "int4h").layout(MODEL, Gpu(), decoding=False).chains == 1
    assert Settings(2, "int4h").layout(MODEL, jax.devices()[0], decoding=False).chains == 1
