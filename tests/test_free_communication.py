"""experiments/free_communication.py: no message is left in the program, whatever the layers look like."""

import json

from helpers import REPOSITORY

MESSAGE = 8 * 16 * 32  # values

CODE = """
import dataclasses, json, sys
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
again = messages(True, 1)
print(json.dumps([exact, free, again]))
"""


def test_every_message_is_left_out_and_nothing_else(run_python):
    path = f"{REPOSITORY}/experiments:{REPOSITORY}/tests"
    run = run_python(CODE, devices=2, env={"PYTHONPATH": f"{REPOSITORY}:{path}"})
    exact, ((whole, rest), (cut, rest_cut)), again = json.loads(run.stdout.splitlines()[-1])
    # Values, not collectives: some versions of XLA join those of two chains. Six sums, whole or by halves; under
    # sequence parallelism six gathers of whole messages, and six sums whose results are halves.
    assert exact == [[6 * MESSAGE, rest], [9 * MESSAGE, rest_cut]]
    assert whole == cut == 0 and rest and rest_cut
    assert again == exact[1]


PREFILL = """
import json
import free_communication
from hlo import collectives
from model_helpers import QWEN2
from helpers import make_mesh
from taco_jax.inference.loading import in_memory, load_params
from taco_jax.inference.programs import Programs
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


def test_a_prompts_messages_are_left_out(run_python):
    """What bench_ttft.py takes for free: the sums of a layer, traced once, and that of the embedding."""
    path = f"{REPOSITORY}/experiments:{REPOSITORY}/tests"
    run = run_python(PREFILL, devices=2, env={"PYTHONPATH": f"{REPOSITORY}:{path}"})
    (exact, rest), (free, others) = json.loads(run.stdout.splitlines()[-1])
    assert exact == 3 * 2 * 64 * 32 and free == 0 and rest == others
