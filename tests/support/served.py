"""What the tests of the server share: a tiny model with a chat template, expected answers, a server in a thread, a real
one in a process of its own."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from checkpoints import VOCAB, edit_json, save
from helpers import REPOSITORY, cpu_environment, until

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'developer' %}"
    "{{ raise_exception('no developer here') }}{% endif %}<{{ message['role'] }}>\n{{ message.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
BATCH, LONGEST = 4, 64
# Seconds for what takes some seconds on an idle machine: a server's start, an answer.
LIMIT = 540


def save_chat_model(folder: Path, longest: int = LONGEST):
    """A llama of random weights, whose answers differ from prompt to prompt."""
    model = save("llama", folder)
    edit_json(folder / "config.json", max_position_embeddings=longest)
    _name_all_tokens(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    return model


def _name_all_tokens(path: Path) -> None:
    """The ids behind the 256 bytes get texts of several characters too."""
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"<{i}>": i for i in range(256, VOCAB)}
    path.write_text(json.dumps(content))


@contextlib.contextmanager
def in_thread(service):
    """The address of a server around a service whose engine runs."""
    import uvicorn

    from taco_jax.inference.serving.app import make_app
    from taco_jax.inference.serving.process import address, bind

    bound = bind("127.0.0.1", 0)
    # Its own configuration of logs closes the stream of absl's handler, which is pytest's.
    config = uvicorn.Config(make_app(service), log_level="warning", log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    url = address(bound)
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(timeout=LIMIT)
        assert not thread.is_alive(), f"limit of {LIMIT} s: waited for the server's thread to end"


class Process:
    """`python -m taco_jax.serve` on a free port. url: set once it is ready."""

    def __init__(self, folder: Path, *options: str):
        environment = os.environ | cpu_environment()  # the tests' own devices: programs come from their cache
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "taco_jax.serve", "--model", str(folder), "--port", "0", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        late, reading = [], threading.Timer(LIMIT, lambda: (late.append(LIMIT), self.process.kill()))
        reading.start()
        self.line = self.process.stdout.readline()
        reading.cancel()
        found = re.fullmatch(r"serving (\S+) at (http://\S+)/v1\n", self.line)
        if not found:
            self.process.kill()
            limit = f" (limit of {LIMIT} s: waited for its address)" if late else ""
            raise AssertionError(f"no server{limit}: {self.line!r}\n{self.process.communicate()[1][-4000:]}")
        self.name, self.url = found.groups()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """(exit status, stderr) once it has ended by itself."""
        try:
            until(lambda: self.process.poll() is not None, "the server's process to end")
            return self.process.returncode, self.process.stderr.read()
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
