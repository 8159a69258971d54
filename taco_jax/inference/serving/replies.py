"""OpenAI's response objects, whole and in pieces."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from taco_jax.inference.serving.service import Answer, Delta
from taco_jax.inference.serving.spelling import joined

DONE = "data: [DONE]\n\n"


def event(content: Any) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Reply:
    """Writes the objects of one response, all under one id. include_usage: as of stream_options."""

    def __init__(self, model: str, *, chat: bool, include_usage: bool = False):
        self._chat, self._include_usage = chat, include_usage
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Sequence[Delta]], answer: Answer) -> dict[str, Any]:
        """Returns the object of all choices, each of its deltas."""
        choices = [
            self._choice(i, self._content("".join(delta.text for delta in deltas)), deltas[-1].reason,
                         joined(delta.logprobs for delta in deltas))
            for i, deltas in enumerate(choices)
        ]  # fmt: skip
        return {**self._head, "choices": choices, "usage": usage(answer)}

    def opening(self) -> Iterable[dict[str, Any]]:
        """Returns what comes before the first delta."""
        if self._chat:
            yield self._chunk([self._choice(0, {"delta": {"role": "assistant", "content": ""}}, None)])

    def delta(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Returns the pieces of a delta. A chat's reason comes by itself, after the last text."""
        if not self._chat:
            yield self._chunk([self._choice(delta.index, {"text": delta.text}, delta.reason, delta.logprobs)])
            return
        if delta.text or delta.logprobs:
            content = {"delta": {"content": delta.text}}
            yield self._chunk([self._choice(delta.index, content, None, delta.logprobs)])
        if delta.reason:
            yield self._chunk([self._choice(delta.index, {"delta": {}}, delta.reason)])

    def closing(self, answer: Answer) -> Iterable[dict[str, Any]]:
        """Returns what comes after the last delta."""
        if self._include_usage:
            yield {**self._chunk([]), "usage": usage(answer)}

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self._chat else {"text": text}

    def _choice(
        self, index: int, content: dict[str, Any], reason: str | None, logprobs: dict | list | None = None
    ) -> dict[str, Any]:
        if self._chat and logprobs is not None:
            logprobs = {"content": logprobs, "refusal": None}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices} | ({"usage": None} if self._include_usage else {})
