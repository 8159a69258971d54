"""A model's chat template in a process of its own, which can be given up: `TemplateProcess`, and the program it runs.

A template is a program that came with a model: it may loop for ever, or write gigabytes. Jinja's sandbox keeps it from
files and from Python, not from that. So this file is run as a program too, with a limit of CPU time for each text, of
memory, and of the text's length. It reads lines of JSON and answers each with one:

    {"source": template}                              -> {} or {"failed": why it cannot be read}
    {"values": names of the template, "most": bytes}  -> {"text"}, {"failed": why}, or {"long": bytes so far}

Both have "seconds" too, the limit of CPU time. It imports no more than Jinja: not this package, and so not JAX.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

READ_SECONDS, RENDER_SECONDS = 10.0, 1.0
"""CPU time for reading a template and for a text of it, which takes milliseconds."""
PATIENCE = 30
"""A process that has not answered in so many times its limit of CPU time is given up, however busy the machine is."""
MEMORY = 1 << 30
"""Bytes of address space."""


class TemplateFailure(Exception):
    """The template cannot be read, or refuses these values; the message says why."""


class TemplateTooLong(Exception):
    """The text has more bytes than were asked for."""


class TemplateProcess:
    """A process that holds one template. Raises TemplateFailure where the template cannot be read."""

    def __init__(self, source: str):
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:
            # -P: nothing of this folder shadows a module of Python's.
            command = [sys.executable, "-P", __file__]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing)
        except OSError as error:
            raise TemplateFailure(f"no process for it: {error.strerror}") from None
        self.alive = True
        try:
            self._ask({"source": source}, READ_SECONDS)
        except TemplateFailure:
            self.close()
            raise

    def render(self, values: Mapping[str, Any], most: int) -> str:
        """The template's text. Raises TemplateFailure and, for more than `most` bytes, TemplateTooLong."""
        answer = self._ask({"values": values, "most": most}, RENDER_SECONDS)
        if "long" in answer:
            raise TemplateTooLong
        return answer["text"]

    def close(self) -> None:
        """Ends the process, whatever it does; a thread that waits for it gets a TemplateFailure."""
        self.alive = False
        self._process.kill()
        self._process.wait()

    def _ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        watch = threading.Timer(PATIENCE * seconds, self.close)
        watch.daemon = True
        watch.start()
        try:
            self._process.stdin.write(json.dumps({**question, "seconds": seconds}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        finally:
            watch.cancel()
        if not line.endswith(b"\n"):
            self._end(seconds)
        answer = json.loads(line)
        if "failed" in answer:
            raise TemplateFailure(answer["failed"])
        return answer

    def _end(self, seconds: float) -> None:
        given_up = not self.alive
        self.alive = False
        status = self._process.wait()  # it has closed its end
        if status == -signal.SIGPROF or given_up:
            raise TemplateFailure(f"it has not ended after {seconds:g} s")
        raise TemplateFailure(f"its process has ended with status {status}: out of memory?")


def main() -> None:
    """The program: answers the lines of stdin on stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the end of stdin ends this process
    environment = _environment()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    template = None
    for line in sys.stdin:
        question = json.loads(line)
        # Without a handler the signal ends the process, inside of an endless loop in C too.
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        try:
            if "source" in question:
                template = environment.from_string(question["source"])
                answer = {}
            else:
                answer = _render(template, question["values"], question["most"])
        except MemoryError:
            answer = {"failed": "it takes too much memory"}
        except Exception as error:  # whatever the template does with values that it does not expect
            answer = {"failed": (str(error) or type(error).__name__)[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _render(template, values: dict[str, Any], most: int) -> dict[str, Any]:
    parts, size = [], 0
    for part in template.generate(**values):
        size += len(part.encode())
        if size > most:
            return {"long": size}
        parts.append(part)
    return {"text": "".join(parts)}


def _environment():
    """Returns the environment that templates of Hugging Face's models expect."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what a model was trained on; for a prompt it means nothing."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str):
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern),
    }
    return environment


if __name__ == "__main__":
    main()
