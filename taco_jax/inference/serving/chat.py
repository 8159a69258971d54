"""Messages of a chat into one prompt, by the model's own template, in Jinja's sandbox.

What templates of Hugging Face's models expect to find: messages, add_generation_prompt, the special tokens by name,
raise_exception, strftime_now, a `tojson` that leaves characters as they are, {% break %} and {% generation %}.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from taco_jax.inference.serving.errors import RequestError
from taco_jax.inference.templates import Template

UNSUPPORTED = "chat_template"


class Chat:
    """`prompt(messages)`. why: what keeps this model from chats, None where nothing does."""

    def __init__(self, template: Template | None):
        self._template, self._tokens, self.why = None, {}, "the model's files hold no chat template"
        if template is None:
            return
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template, self._tokens = environment.from_string(template.source), template.tokens
            self.why = None
        except jinja2.TemplateError as error:
            self.why = f"the model's chat template cannot be read ({error})"

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that ends where the model's answer begins.

        Raises:
          RequestError: no template, or one that does not take these messages.
        """
        if self._template is None:
            raise RequestError(f"{self.why}; /v1/completions works", "messages", code=UNSUPPORTED)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, tools=None,
                documents=None, **self._tokens,
            )  # fmt: skip
        except Exception as error:  # whatever the template does with roles that it does not expect
            reason = str(error) or type(error).__name__
            raise RequestError(f"messages: the model's chat template refuses them: {reason}", "messages") from None


class _Generation(Extension):
    """{% generation %} marks what a model was trained on; for a prompt it means nothing."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
