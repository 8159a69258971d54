"""Weights, logits and settings that are no numbers: one line, whoever meets them."""

import threading
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import make_mesh
from model_folders import UP, arrays, load, up, write

from taco_jax.config import ConfigError
from taco_jax.inference.loading import in_memory, load_params, open_checkpoint
from taco_jax.inference.sampling import NOT_FINITE, Sampling, greedy, sample
from taco_jax.inference.tensors import SINGLE

pytest.importorskip("safetensors", reason="the extra inference: pip install 'taco-jax[inference]'")


# Weights and settings that are no numbers.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite(tmp_path, dtype, value):
    tensors = {name: array.astype(dtype) for name, array in arrays().items()}
    tensors[UP][3, 5] = value
    folder = write(tmp_path / "model", files={SINGLE: tensors})
    with pytest.raises(ConfigError, match=f"{SINGLE}: the tensor '{UP}' holds NaN or infinities"):
        load(folder)


def test_weights_beyond_the_compute_type(tmp_path):
    tensors = arrays()
    tensors[UP][0, 0] = 1e5
    checkpoint = open_checkpoint(write(tmp_path / "model", files={SINGLE: tensors}))
    assert up(load_params(checkpoint, make_mesh(), jnp.bfloat16))[0, 0] == jnp.bfloat16(1e5)
    with pytest.raises(ConfigError, match=f"'{UP}' holds numbers beyond what float16 reaches; use dtype bfloat16"):
        load_params(checkpoint, make_mesh(), jnp.float16)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_parameters_in_memory_that_are_not_finite(tmp_path, place):
    checkpoint = open_checkpoint(write(tmp_path / "model"))
    params = load_params(checkpoint, make_mesh(), jnp.float32)
    params["layers"]["mlp"]["up"]["kernel"] = place(np.full((1, 8, 16), np.nan, np.float32))
    with pytest.raises(ConfigError, match="params: the tensor 'layers/mlp/up/kernel' holds NaN or infinities"):
        load_params(in_memory(checkpoint.config, params), make_mesh(), jnp.float32)


def test_logits_that_are_not_finite_are_no_answer(tmp_path):
    """Finite weights whose product is not: the first prompt says it, and so does a server before it is ready."""
    import taco_jax
    from taco_jax.inference.serving.batch_programs import RowPrograms

    tensors = arrays()
    tensors["model.norm.weight"][:] = 3e38
    generator = taco_jax.Generator(write(tmp_path / "model", files={SINGLE: tensors}), dtype="float32")
    message = "prompt 0: the model's logits hold NaN or infinities; its weights, norm_eps or rope_theta are damaged"
    with pytest.raises(ConfigError, match=message):
        list(generator.generate([5, 7], max_tokens=1))
    arguments = generator.config, generator.settings, generator.mesh, generator.programs.params
    assert RowPrograms(*arguments, 1, 2).first_token() == NOT_FINITE


def test_an_evaluation_whose_loss_is_not_finite(tmp_path, monkeypatch):
    from taco_jax.inference import evaluate, perplexity

    library = pytest.importorskip("tokenizers")
    folder, text = write(tmp_path / "model"), tmp_path / "text"
    library.Tokenizer(library.models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    text.write_text("aaaa")
    scored = SimpleNamespace(score=lambda settings: SimpleNamespace(loss=float("nan")))
    monkeypatch.setattr(perplexity, "Evaluation", lambda *_: scored)
    with pytest.raises(ConfigError, match=f"--model {folder}: the model's logits hold NaN or infinities"):
        evaluate.perplexity(evaluate.PerplexityConfig(model=str(folder), text=str(text), context=8))


def test_tokens_of_logits_that_are_not_finite():
    logits = np.tile(np.float32([-np.inf, 1, 3, 2]), (4, 1))  # as a table's padding is masked
    logits[1, 0], logits[2, 1], logits[3, :] = np.nan, np.inf, -np.inf
    for tokens in (greedy(logits), sample(logits, np.arange(4), Sampling(0.5, top_k=1).rows(4))):
        assert np.asarray(tokens).tolist() == [2, NOT_FINITE, NOT_FINITE, NOT_FINITE]


def test_the_engine_ends_a_job_whose_logits_are_not_finite():
    """And only that one: its row is free, the engine goes on."""
    from taco_jax.inference.logprobs import Scores
    from taco_jax.inference.serving.batch_programs import Inserted
    from taco_jax.inference.serving.engine import Engine
    from taco_jax.inference.serving.engine_types import Event, Job

    class Programs:
        """Whose token is that of the prompt, and whose log-probabilities at the token 5 are NaN."""

        batch, longest, params = 1, 8, None

        def empty(self):
            return SimpleNamespace(tokens=np.zeros(1, np.int32)), None

        def put(self, tree):
            return tree

        def insert(self, length, *, top, whole):
            def run(params, state, cache, tokens_1L, *_):
                values_L = np.where(tokens_1L[0] == 5, np.nan, -1.0)
                scores = lambda values: Scores(values, values[:, None], np.zeros((len(values), 1), np.int32))
                said = Inserted(scores(values_L[:1]), scores(values_L)) if whole else Inserted()
                return SimpleNamespace(tokens=tokens_1L[:, 0]), cache, said

            return run

    events, done = [], threading.Event()
    engine = Engine(Programs(), waiting=4)
    engine.start()
    engine.submit([Job([NOT_FINITE], 1, events.append), Job([7], 1, lambda event: (events.append(event), done.set()))])
    assert done.wait(30) and events == [Event(None, "not finite"), Event(7, "length")] and engine.failure is None
    # Inside of a prompt that is scored, though the token that follows it is one; nothing is said of its last token.
    events, done = [], threading.Event()
    scored = [Job([*ids], 0, events.append, top=1, whole=True) for ids in ((6, 5, 7), (6, 7, 5))]
    engine.submit([*scored, Job([7], 1, lambda event: done.set())])
    assert done.wait(30) and [event[:3] for event in events] == [(None, "not finite", None), (None, "length", None)]
    assert events[1].prompt.chosen.tolist() == [-1, -1] and events[0].prompt is None
    engine.stop()


def test_a_request_whose_logits_are_not_finite_gets_status_500():
    from taco_jax.inference.serving.engine_types import Event, RequestError
    from taco_jax.inference.serving.service import Answer, Service

    service, answer = Service.__new__(Service), Answer.__new__(Answer)
    service._generator, answer._service = SimpleNamespace(settings=SimpleNamespace(dtype="float16")), service
    with pytest.raises(RequestError, match="logits hold NaN or infinities.*float16 reaches: try dtype bf") as error:
        answer._delta(0, Event(None, "not finite"))
    assert error.value.status == 500
