"""Two processes with four emulated devices each rewrite alike, and compute what one process does."""

import json
import os
import subprocess
import sys

import dropin_process
import pytest
from helpers import REPOSITORY, cpu_environment
from meetings import free_port

SUPPORT = REPOSITORY / "tests" / "support"


def start(port, process, processes):
    environment = os.environ | cpu_environment(devices=8 // processes)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (REPOSITORY, SUPPORT)))
    command = [sys.executable, SUPPORT / "dropin_process.py", *map(str, (port, process, processes))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(processes):
    """What each process has found."""
    port = free_port()
    running = [start(port, n, processes) for n in range(processes)]
    try:
        outputs = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, err) in zip(running, outputs):
        assert process.returncode == 0, (out[-2000:], err[-4000:])
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("JSON ")]
    return [json.loads(line.removeprefix("JSON ")) for line in lines]


@pytest.mark.slow
def test_two_processes_rewrite_alike(capsys):
    first, second = results(2)
    dropin_process.main(0, 0, 1)
    alone = json.loads(capsys.readouterr().out.partition("JSON ")[2])
    assert first == second
    assert 0.98 < first["least"] and first["greatest"] < 1.02 and 0 < first["error"] < 0.08
    codecs = {(site[1], site[-2]) for site in first["sites"] if site[-2] != "none"}
    assert codecs == {("tensor", "int8h"), ("data", "int6h")}
    assert first["sites"] == alone["sites"]
    for ours, theirs in zip(first["sum"], alone["sum"]):
        assert abs(ours - theirs) < 0.01 * theirs
