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
    found = collectives(run.compiled()[0])
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
