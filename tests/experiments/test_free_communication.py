"""experiments/free_communication.py: no message is left in the program, whatever the layers look like."""

import json

import pytest
from helpers import REPOSITORY, run_python

# Benchmarks alone take it.
pytestmark = pytest.mark.slow
MESSAGE = 8 * 16 * 32  # values

TRAINING = """
import json
import free_communication
from hlo import collectives
from model_helpers import QWEN2, Run

def messages(sequence_parallel, chains):
    # 8 x 16 x 32 values, half as many in one of two chains or when they are cut over two ranks. Weights have more,
    # the sums of the loss fewer.
    run = Run(QWEN2, tp=2, batch=8, sequence_parallel=sequence_parallel, chains=chains)
    found = collectives(run.value_and_grad().lower(*run.arguments()).compile())
    return sum(n for _, _, n in found if 1024 <= n <= 4096), len([1 for _, _, n in found if not 1024 <= n <= 4096])

exact = [messages(False, 2), messages(True, 1)]
with free_communication.messages_left_out():
    free = [messages(False, 2), messages(True, 1)]
print(json.dumps([exact, free]))
"""


def test_every_message_is_left_out_and_nothing_else(printed):
    exact, ((whole, rest), (cut, rest_cut)) = printed[0]
    # Values, not collectives: some versions of XLA join those of two chains. Six sums, whole or by halves; under
    # sequence parallelism six gathers of whole messages, and six sums whose results are halves.
    assert exact == [[6 * MESSAGE, rest], [9 * MESSAGE, rest_cut]]
    assert whole == cut == 0 and rest and rest_cut


PREFILL = """
from helpers import make_mesh
from taco_jax.inference.loading import in_memory, load_params
from taco_jax.inference.compiled import Programs
from taco_jax.inference.settings import Settings

mesh = make_mesh(tp=2)
params = load_params(in_memory(QWEN2), mesh, "float32")

def messages():
    found = collectives(Programs(QWEN2, Settings(2, dtype="float32"), mesh, params).prefill(2, 64, 64, greedy=True))
    return sum(n for _, _, n in found if n == 2 * 64 * 32), len([1 for _, _, n in found if n != 2 * 64 * 32])

exact = messages()
with free_communication.messages_left_out():
    free = messages()
print(json.dumps([exact, free]))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Returns what both programs print. One process runs them, whose traces are its own."""
    path = f"{REPOSITORY}:{REPOSITORY}/experiments:{REPOSITORY}/tests/support"
    folder = tmp_path_factory.mktemp("free")
    run = run_python(TRAINING + PREFILL, devices=2, env={"PYTHONPATH": path}, cwd=folder)
    return [json.loads(line) for line in run.stdout.splitlines()[-2:]]


def test_a_prompts_messages_are_left_out(printed):
    """Counts what bench_ttft.py takes for free: the sums of a layer, traced once, and that of the embedding.

    The exact ones come after messages were left out of the programs above: they are back.
    """
    (exact, rest), (free, others) = printed[1]
    assert exact == 3 * 2 * 64 * 32 and free == 0 and rest == others


EMBEDDING = """
import json
import free_communication
import jax
import jax.numpy as jnp
import numpy as np
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from taco_jax.models import decoder

mesh = make_mesh(tp=2)
table = 1 + jnp.arange(256.0)[:, None] * jnp.ones((1, 4))
tokens = jnp.array([[0, 1, 127, 128, 129, 199]])

def rows(cut):
    options = dict(vocab_size=200, sequence_dim=1 if cut else None)
    look_up = lambda table: decoder.vocab_parallel.embed(table, tokens, "tp", **options)
    def f(table):
        x, vjp = jax.vjp(look_up, table)
        return x[None, ..., 0], vjp(jnp.ones_like(x))[0][:, 0]
    x, gradient = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))(table)
    return np.asarray(x).tolist(), np.flatnonzero(gradient).tolist()

with free_communication.messages_left_out():
    free = [rows(cut) for cut in (False, True)]
print(json.dumps(free))
"""


def test_no_row_of_the_embedding_is_zero_and_gradients_are_those_of_own_tokens(tmp_path):
    path = f"{REPOSITORY}:{REPOSITORY}/experiments:{REPOSITORY}/tests/support"
    run = run_python(EMBEDDING, devices=2, env={"PYTHONPATH": path}, cwd=tmp_path)
    (whole, touched), (cut, touched_cut) = json.loads(run.stdout.splitlines()[-1])
    # Rank 0 holds ids 0 to 127, rank 1 128 to 199. Of another's token they take the row at its remainder.
    assert whole == [[[1, 2, 128, 1, 2, 72]], [[129, 130, 184, 129, 130, 200]]]
    assert cut == [[[1, 2, 128]], [[129, 130, 184]]]
    assert touched == [0, 1, 127, 128, 129, 199]
    assert set(touched_cut) <= set(touched)
