"""The engine without HTTP: answers equal those of `Generator`, whoever else is in the batch; rows become free."""

import dataclasses
import queue

import numpy as np
import pytest
from helpers import until
from served import BATCH, LIMIT, LONGEST

import taco_jax

pytest.importorskip("torch", reason="writes the checkpoint: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="writes the checkpoint: pip install 'taco-jax[test]'")

from taco_jax.inference.serving.batch_programs import RowPrograms
from taco_jax.inference.serving.engine import Engine, QueueFull, Stopped
from taco_jax.inference.serving.engine_types import Job, Stops

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(0, 300, length).tolist() for length in (1, 3, 31, 32, 33, 50, 7, 12, 2, 40, 5)]


SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def greedy(generator):
    """What follows each prompt, up to the longest sequence."""
    return _ids(generator)


@pytest.fixture(scope="module")
def sampled(generator):
    """The same with SAMPLED, prompt i with seed 3 + i."""
    return _ids(generator, seed=3, **SAMPLED)


def _ids(generator, **options) -> list[list[int]]:
    rows = [[] for _ in PROMPTS]
    for token in generator.generate(PROMPTS, max_tokens=LONGEST, **options):
        rows[token.row].append(token.id)
    return rows


@pytest.fixture
def engine(programs):
    engine = Engine(programs, waiting=8)
    engine.start()
    yield engine
    engine.stop()


class Listener:
    """Collects the events of a job."""

    def __init__(self, prompt, max_tokens=8, **options):
        self.events = queue.Queue()
        self.job = Job(list(prompt), max_tokens, self.events.put, **options)

    def wait(self) -> tuple[list[int], str]:
        """(tokens, how it ended)."""
        tokens = []
        while True:
            try:
                event = self.events.get(timeout=LIMIT)
            except queue.Empty:
                raise AssertionError(f"limit of {LIMIT} s: waited for the next token of {self.job.prompt}") from None
            tokens += [] if event.token is None else [event.token]
            if event.end:
                return tokens, event.end


def test_greedy_answers_equal_those_of_the_generator(greedy, engine):
    listeners = [Listener(prompt, 1 + 3 * i % 11) for i, prompt in enumerate(PROMPTS)]
    engine.submit([listener.job for listener in listeners])
    for listener, want in zip(listeners, greedy):
        assert listener.wait() == (want[: listener.job.max_tokens], "length"), listener.job.prompt
    assert engine.counts() == (BATCH, 0, 0, len(PROMPTS))


def test_a_row_is_sampled_as_by_the_generator_whoever_is_beside_it(greedy, sampled, engine):
    options = [SAMPLED | {"seed": 3 + i} if i % 3 else {} for i in range(len(PROMPTS))]
    listeners = [Listener(prompt, 10, **each) for prompt, each in zip(PROMPTS, options)]
    engine.submit([listener.job for listener in listeners])
    for i, listener in enumerate(listeners):
        assert listener.wait()[0] == (sampled if i % 3 else greedy)[i][:10]
    assert greedy != sampled


def test_ends_at_eos_and_fills_the_longest_sequence(greedy, engine):
    end = next(token for token in greedy[2] if token != greedy[2][0])
    ending = Listener(PROMPTS[2], 20, eos=frozenset([299, end]))
    long = Listener(PROMPTS[9], LONGEST - len(PROMPTS[9]))
    engine.submit([ending.job, long.job])
    assert ending.wait() == (greedy[2][: greedy[2].index(end) + 1], "eos")
    assert long.wait() == (greedy[9], "length")
    # The step that was under way when a job ended has a token of its row too, which is nobody's.
    assert ending.events.empty() and long.events.empty()


@pytest.mark.slow
def test_compressed_prompts_and_exact_steps(generator):
    """So an answer is the same alone and in company, and the same as Generator's."""
    compressed = taco_jax.Generator(generator.checkpoint, tp=2, dtype="float32", compression="int4h")
    params = compressed.programs.params
    programs = RowPrograms(compressed.config, compressed.settings, compressed.mesh, params, BATCH, LONGEST)
    engine = Engine(programs, waiting=8)
    engine.start()
    short = [prompt for prompt in PROMPTS if len(prompt) <= 12]
    listeners = [Listener(prompt, 10) for prompt in [*short, short[0]]]
    engine.submit([listener.job for listener in listeners])
    answers = [listener.wait()[0] for listener in listeners]
    engine.stop()
    assert answers[-1] == answers[0]
    assert answers[3] == [token.id for token in compressed.generate(short[3], max_tokens=10)]
    codecs = {key[0]: {row.codec for row in table.rows()} for key, table in programs.tables.items()}
    assert codecs == {"insert": {"none", "int4h"}, "step": {"none"}}
    every_size = dataclasses.replace(compressed.settings.compression, min_bytes=0)
    chosen = dataclasses.replace(compressed.settings, compression=every_size)
    programs = RowPrograms(compressed.config, chosen, compressed.mesh, params, BATCH, LONGEST)
    assert programs._decode_layout.par.compression("layers/mlp/down") is not None


def test_a_cancelled_job_frees_its_row_and_disturbs_nobody(greedy, engine, gate):
    running = [Listener(prompt, 12) for prompt in PROMPTS[:BATCH]]
    waiting = [Listener(prompt, 12) for prompt in PROMPTS[BATCH : BATCH + 3]]
    engine.submit([listener.job for listener in running + waiting])
    until(lambda: engine.counts()[:3] == (BATCH, BATCH, 3), "a full batch and three jobs that wait")
    for gone in (running[1], waiting[1]):
        engine.cancel(gone.job)
        engine.cancel(gone.job)
    assert engine.counts()[1:3] == (BATCH - 1, 2)
    gate.set()
    for i, listener in enumerate(running + waiting):
        if listener not in (running[1], waiting[1]):
            assert listener.wait() == (greedy[i][:12], "length")
    assert engine.counts()[1:3] == (0, 0)
    assert running[1].events.qsize() <= 1 and waiting[1].events.empty()


def test_a_full_queue_takes_all_or_nothing(engine, gate):
    listeners = [Listener([7], 4) for _ in range(BATCH + 8 + 2)]
    jobs = [listener.job for listener in listeners]
    engine.submit(jobs[: BATCH + 7])
    with pytest.raises(QueueFull):
        engine.submit(jobs[-2:])
    engine.submit(jobs[-1:])
    with pytest.raises(QueueFull):
        engine.submit(jobs[-2:-1])
    assert engine.counts().taken == BATCH + 8
    gate.set()
    assert {listener.wait()[1] for listener in listeners[: BATCH + 7] + listeners[-1:]} == {"length"}


def test_what_fails_on_the_devices_fails_all_jobs(programs, monkeypatch, capsys):
    def broken(**kind):
        raise RuntimeError("INTERNAL: a device is lost\nmore")

    monkeypatch.setattr(programs, "step", broken)
    engine = Engine(programs, waiting=8)
    listeners = [Listener(prompt) for prompt in PROMPTS[: BATCH + 2]]
    engine.submit([listener.job for listener in listeners])
    engine.start()
    assert {listener.wait()[1] for listener in listeners} == {"failed"}
    with pytest.raises(Stopped, match="the engine has stopped .RuntimeError: INTERNAL: a device is lost"):
        engine.submit([Listener([1]).job])
    assert capsys.readouterr().err == "error: the engine has stopped: RuntimeError: INTERNAL: a device is lost\n"
    assert engine.failure and engine.counts()[1:3] == (0, 0)


def test_stopping_ends_what_is_under_way(programs, gate):
    engine = Engine(programs, waiting=8)
    engine.start()
    listeners = [Listener(prompt, 12) for prompt in PROMPTS[: BATCH + 1]]
    engine.submit([listener.job for listener in listeners])
    gate.set()
    engine.stop()
    assert all(listener.wait()[1] in ("failed", "length") for listener in listeners)
    assert not engine._thread.is_alive()


@pytest.mark.parametrize("stops", [["ab"], ["abc", "bd"], ["aaa"], ["abab", "ba c"], ["c"], []])
def test_stop_strings_are_found_however_the_text_is_cut(stops):
    random = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(random.choice(list("abcd "), 12, p=[0.4, 0.3, 0.1, 0.1, 0.1]))
        cuts = sorted({0, 12, *random.integers(0, 12, 4).tolist()})
        found, out = Stops(stops), ""
        for start, stop in zip(cuts, cuts[1:]):
            out += found.add(text[start:stop])
        begins = [at for at in map(text.find, stops) if at >= 0]
        assert found.stopped == bool(begins)
        assert out + found.rest() == (text[: min(begins)] if begins else text), (text, cuts)


def test_text_is_held_back_only_while_a_stop_string_may_begin_in_it():
    stops = Stops(["\n\nUser"])
    assert [stops.add(part) for part in ("Hi", "\n", "x\n", "\nUs", "e", "d")] == ["Hi", "", "\nx", "", "", "\n\nUsed"]
    assert stops.rest() == "" and not stops.stopped
