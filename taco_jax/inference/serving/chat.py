"""Messages of a chat into one prompt, by the model's own template.

The template runs in processes of its own (`serving.template_process`), of which the first starts with the first chat.
It finds what templates of Hugging Face's models expect: messages, add_generation_prompt, the special tokens by name,
raise_exception, strftime_now, a `tojson` that leaves characters as they are, {% break %} and {% generation %}.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from taco_jax.inference.serving.engine_types import RequestError
from taco_jax.inference.serving.template_process import TemplateFailure, TemplateProcess, TemplateTooLong
from taco_jax.inference.templates import Template

UNSUPPORTED = "chat_template"


class Chat:
    """`prompt(messages)`, from any thread; as many processes as threads have been in it at once. `close` ends them."""

    def __init__(self, template: Template | None):
        self._template, self._why = template, None
        self._lock, self._idle, self._all = threading.Lock(), [], []
        self._read = self._closed = False
        if template is None:
            self._why = "the model's files hold no chat template"

    @property
    def why(self) -> str | None:
        """Returns what keeps this model from chats; None where nothing does."""
        if self._why is None and not self._read:
            try:
                self._idle.append(self._new())
            except TemplateFailure:
                pass
        return self._why

    @property
    def source(self) -> str:
        """The template, and all that it may write by itself."""
        return "" if self._template is None else "\n".join([self._template.source, *self._template.tokens.values()])

    def prompt(self, messages: Sequence[Mapping[str, Any]], most: int = 1 << 30) -> str:
        """The text that ends where the model's answer begins.

        Raises:
          RequestError: no template, one that does not take these messages or does not end, or a text of more than
            `most` bytes.
        """
        if self._why is None:
            values = {"messages": list(messages), "add_generation_prompt": True, "tools": None, "documents": None}
            try:
                return self._render(values | dict(self._template.tokens), most)
            except TemplateTooLong:
                message = f"messages: more than {most} bytes as the model's chat template writes them"
                raise RequestError(message, "messages", code="context_length_exceeded") from None
            except TemplateFailure as error:
                if self._why is None:
                    message = f"messages: the model's chat template refuses them: {error}"
                    raise RequestError(message, "messages") from None
        raise RequestError(f"{self._why}; /v1/completions works", "messages", code=UNSUPPORTED)

    def close(self) -> None:
        """Ends all processes; a `prompt` that is under way raises RequestError."""
        with self._lock:
            self._closed = True
            for process in self._all:
                process.close()

    def _render(self, values: dict[str, Any], most: int) -> str:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or self._new()
        try:
            return process.render(values, most)
        finally:
            with self._lock:
                (self._idle.append if process.alive else self._all.remove)(process)

    def _new(self) -> TemplateProcess:
        try:
            process = TemplateProcess(self._template.source)
        except TemplateFailure as error:
            if not self._read:  # else it is the machine's fault, and passes
                self._why = f"the model's chat template cannot be read ({error})"
            raise
        with self._lock:
            self._read = True
            self._all.append(process)
            if self._closed:
                process.close()
        return process
