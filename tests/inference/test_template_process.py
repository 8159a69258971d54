"""Chat templates that do not end, or write too much: they are given up, and the next chat is answered."""

import threading
import time

import pytest

pytest.importorskip("jinja2", reason="the extra serve: pip install 'taco-jax[serve]'")

from taco_jax.inference.serving import template_process
from taco_jax.inference.serving.chat import Chat
from taco_jax.inference.serving.engine_types import RequestError
from taco_jax.inference.serving.template_process import TemplateFailure, TemplateProcess
from taco_jax.inference.templates import Template

# What it does is the first message's word.
SOURCE = """{% set word = messages[0].content %}
{% if word == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% elif word == 'write' %}{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}
{% elif word == 'memory' %}{{ word * 2 ** 40 }}
{% elif word == 'power' %}{{ 7 ** (99999999 + word | length) }}
{% else %}{{ word }}!{% endif %}"""


def say(chat, word: str, most: int = 1000) -> str:
    return chat.prompt([{"role": "user", "content": word}], most)


@pytest.fixture(scope="module")
def chat():
    chat = Chat(Template(SOURCE, {}))
    yield chat
    chat.close()


@pytest.mark.parametrize(
    "word, message",
    [
        ("loop", "refuses them: it has not ended after 0.05 s"),
        ("power", "refuses them: it has not ended after 0.05 s"),  # within one operation of C
        ("memory", "refuses them: it takes too much memory"),
        ("write", "more than 1000 bytes as the model's chat template writes them"),
        ("ü" * 500, "more than 1000 bytes"),
    ],
    ids=["loop", "power", "memory", "write", "long"],
)
def test_what_does_not_end_is_refused_and_the_next_chat_is_answered(chat, monkeypatch, word, message):
    assert say(chat, "Hi") == "Hi!"
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "RENDER_SECONDS", 0.05)  # of CPU time
        with pytest.raises(RequestError, match=message) as caught:
            say(chat, word)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert say(chat, "ü" * 499) == "ü" * 499 + "!"
    assert len(chat._all) == 1


def test_close_ends_a_chat_that_is_under_way():
    chat, refused = Chat(Template(SOURCE, {})), []
    say(chat, "Hi")

    def ask():
        with pytest.raises(RequestError) as caught:
            say(chat, "loop")
        refused.append(caught.value.status)

    thread = threading.Thread(target=ask)
    thread.start()
    while chat._idle:
        time.sleep(0.001)
    chat.close()
    thread.join(60)
    assert refused == [400]


def test_a_template_that_does_not_end_while_it_is_read(monkeypatch):
    """Jinja works out constant expressions at once."""
    monkeypatch.setattr(template_process, "READ_SECONDS", 0.2)
    with pytest.raises(TemplateFailure, match="has not ended after 0.2 s"):
        TemplateProcess("{{ 7 ** 99999999 }}")
    assert Chat(Template("{{ 7 ** 99999999 }}", {})).why.startswith(
        "the model's chat template cannot be read (it has not"
    )


def test_as_many_processes_as_chats_at_once(chat):
    threads = [threading.Thread(target=say, args=(chat, "Hi")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(chat._all) <= 8 and sorted(map(id, chat._idle)) == sorted(map(id, chat._all))
