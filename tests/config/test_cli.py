"""What commands run under: output that nobody takes, exit codes, closed streams."""

import io
import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY

from taco_jax.config import (
    ConfigError,
    cli,
)


def test_a_program_goes_on_without_its_output(monkeypatch, capfd):
    """A reader that has gone, as after `| head`, and a device that is full: one line, and what follows is dropped."""
    read, write = os.pipe()
    os.close(read)
    for descriptor, reason in ((write, "Broken pipe"), (os.open("/dev/full", os.O_WRONLY), "No space left on device")):
        with open(descriptor, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            for number in range(3):
                cli.say(f"step {number}")
            assert os.readlink(f"/proc/self/fd/{descriptor}") == os.devnull
        assert capfd.readouterr().err == f"standard output: {reason}; it goes on without\n"


def _prints(flush: bool, after: Exception | None = None):
    def main(args):
        print("text", flush=flush)
        if after:
            raise after
        return 0

    return main


@pytest.mark.parametrize(
    "reader_has_gone, main, code, line",
    [
        (True, _prints(flush=True), 141, ""),
        (True, _prints(flush=False), 141, ""),
        (True, _prints(flush=False, after=SystemExit(0)), 141, ""),
        (True, _prints(flush=False, after=ConfigError("x=1: no")), 2, "error: x=1: no\n"),
        (False, _prints(flush=True), 1, "error: standard output: No space left on device\n"),
    ],
    ids=["printing", "at its end", "help", "bad setting", "full"],
)
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_program_ends_with_its_output(monkeypatch, capfd, reader_has_gone, main, code, line, unbuffered):
    """One that is of no use without: in silence where its reader has gone, as after `| head`, else in one line."""
    if unbuffered and code == 2:
        code, line = 141, ""  # it has ended before it comes to that
    read, descriptor = os.pipe() if reader_has_gone else (None, os.open("/dev/full", os.O_WRONLY))
    if reader_has_gone:
        os.close(read)
    with open(descriptor, "wb", buffering=0 if unbuffered else -1) as raw:
        stream = io.TextIOWrapper(raw, write_through=unbuffered)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert cli.run(main, []) == code
            assert sys.stdout is stream
            stream.flush()  # as Python does at its end
    assert capfd.readouterr().err == line


def test_errors_of_files_are_not_those_of_standard_output(tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.run(lambda args: open(tmp_path / "absent"), [])


def test_standard_streams_that_are_closed_are_nobody_elses(tmp_path):
    """A file that is opened never has the number at which native code writes what it has to say."""
    code = (
        "import os, sys; from taco_jax.config import cli; "
        f"print_to = lambda args: open({str(tmp_path / 'file')!r}, 'w').write(f'{{os.open(os.devnull, 0)}}'); "
        "sys.exit(cli.run(lambda args: print_to(args) and sys.stderr.flush(), []))"
    )
    argv = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(argv, cwd=REPOSITORY, timeout=120).returncode == 0
    assert int((tmp_path / "file").read_text()) > 2
