"""The bodies of requests, checked field by field before anything else happens.

A field that would change the answer and that this server has not is refused, unless its value is the one that changes
nothing (n=1, suffix=null). Fields that OpenAI's clients send along and that change no answer are taken and ignored.
Any other field is an error, with the nearest known name, unless it is null: programs that pass on what they were sent
write out all fields that they know.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from taco_jax.errors import did_you_mean
from taco_jax.inference.logprobs import MOST_ALTERNATIVES
from taco_jax.inference.serving.engine_types import RequestError

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's; an answer in a chat ends at the longest sequence
MAX_STOPS = 4
ROLES = ("system", "developer", "user", "assistant")

OWN = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "ignore_eos")
OWN_OF_COMPLETIONS = ("prompt", "logprobs", "echo")
OWN_OF_CHATS = ("messages", "max_completion_tokens", "logprobs", "top_logprobs")
IGNORED = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "priority", "cache_prompt",
)  # fmt: skip
IGNORED_OF_MESSAGES = (
    "id", "object", "created", "created_at", "createdAt", "timestamp", "metadata", "status", "cache_control",
)  # fmt: skip
# Field -> the values that ask for nothing; null always is one.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    # Of vLLM, llama.cpp and others, whose clients send them.
    "best_of": (1,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
OF_COMPLETIONS = {"suffix": ("",), "add_special_tokens": (True,)}
OF_CHATS = {
    "echo": (False,), "add_special_tokens": (False,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "documents": ([],), "include_reasoning": (True, False),
    "tools": ([],), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False), "functions": ([],), "function_call": ("none", "auto"), "audio": (),
    "modalities": (["text"],), "prediction": (), "reasoning_effort": (), "verbosity": ("medium",),
    "web_search_options": (), "response_format": ({"type": "text"},),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Request:
    """prompts: texts or ids, or the messages of one chat. max_tokens: None where the client named none.

    logprobs: alternatives of each token; None for no log-probabilities. echo: prompts come with their answers.
    """

    model: str | None
    prompts: tuple[str | list[int], ...]
    messages: list[dict[str, Any]] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    logprobs: int | None = None
    echo: bool = False


def parse(raw: bytes, *, chat: bool) -> Request:
    """The request of a body. Raises RequestError, naming the field, its value and the rule."""
    body = _object(raw)
    neutral = NEUTRAL | (OF_CHATS if chat else OF_COMPLETIONS)
    own = [*OWN, *(OWN_OF_CHATS if chat else OWN_OF_COMPLETIONS)]
    for key, value in body.items():
        if key in neutral:
            _check_neutral(key, value, neutral[key])
        elif value is not None and key not in own and key not in IGNORED:
            hint = did_you_mean(key[:60], [*own, *neutral], otherwise="")
            raise RequestError(f"{key[:60]}: no such field{'; ' if hint else ''}{hint}", key[:60])
    get = lambda key, default=None: default if body.get(key) is None else body[key]
    stream = _boolean(get("stream", False), "stream")
    echo = not chat and _boolean(get("echo", False), "echo")
    return Request(
        model=_model(get("model")),
        prompts=() if chat else _prompts(get("prompt")),
        messages=_messages(get("messages")) if chat else None,
        max_tokens=_max_tokens(get, chat, echo),
        temperature=_number(get("temperature", 1.0), "temperature", 0, 2),
        top_p=_top_p(get("top_p", 1.0)),
        top_k=max(0, _integer(get("top_k", 0), "top_k", -1, 2**31 - 1)),  # -1: all tokens, as 0
        seed=None if get("seed") is None else _integer(get("seed"), "seed", -(2**63), 2**63 - 1),
        stop=_stop(get("stop", [])),
        ignore_eos=_boolean(get("ignore_eos", False), "ignore_eos"),
        stream=stream,
        include_usage=_include_usage(get("stream_options"), stream),
        logprobs=_logprobs(get, chat),
        echo=echo,
    )


def _object(raw: bytes) -> dict[str, Any]:
    def refuse(name: str):
        raise ValueError(f"{name} is no JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse)
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # a lone half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(body)}")
    return body


def _check_neutral(key: str, value: Any, allowed: Sequence[Any]) -> None:
    same = lambda a, b: a == b and isinstance(a, bool) == isinstance(b, bool)
    if value is not None and not any(same(value, each) for each in allowed):
        rest = " or ".join(["null", *map(json.dumps, allowed)])
        raise RequestError(f"{key}={_shown(value)}: is not supported here; leave it out ({rest} is taken)", key)


def _model(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"model={_shown(value)}: must be a string, not {_kind(value)}", "model")
    return value


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    rule = "must be a text, token ids, a list of texts or a list of lists of token ids, none of them empty"
    is_ids = lambda v: isinstance(v, list) and v and all(type(i) is int for i in v)
    if value is None:
        raise RequestError(f"prompt: is needed; it {rule}", "prompt")
    prompts = [value] if isinstance(value, str) or is_ids(value) else value
    good = (
        isinstance(prompts, list)
        and prompts
        and (all(isinstance(p, str) for p in prompts) or all(map(is_ids, prompts)))
    )
    if not good or "" in prompts:
        raise RequestError(f"prompt={_shown(value)}: {rule}", "prompt")
    return tuple(prompts)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"messages={_shown(value)}: must be a list of at least one message", "messages")
    return [_message(each, f"messages[{i}]") for i, each in enumerate(value)]


def _message(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{at}={_shown(value)}: must be an object with role and content", at)
    for key in value:
        if key not in ("role", "content", "name", *IGNORED_OF_MESSAGES) and value[key] not in (None, [], {}, ""):
            field = f"{at}.{key[:60]}"
            raise RequestError(f"{field}: is not supported here; a message has role, content and name", field)
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{at}.role={_shown(role)}: must be one of {', '.join(ROLES)}", f"{at}.role")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{at}.content: only parts of type text are supported", f"{at}.content")
        content = "".join(texts)
    if not isinstance(content, str):
        raise RequestError(f"{at}.content={_shown(content)}: must be a text, or a list of parts", f"{at}.content")
    if not isinstance(value.get("name", ""), str | None):
        raise RequestError(f"{at}.name={_shown(value['name'])}: must be a string", f"{at}.name")
    return {"role": role, "content": content} | ({"name": value["name"]} if value.get("name") else {})


def _logprobs(get, chat: bool) -> int | None:
    """Alternatives of each token. A chat says by another field whether it wants any."""
    if not chat:
        return None if get("logprobs") is None else _integer(get("logprobs"), "logprobs", 0, MOST_ALTERNATIVES)
    wanted = _boolean(get("logprobs", False), "logprobs")
    top = _integer(get("top_logprobs", 0), "top_logprobs", 0, MOST_ALTERNATIVES)
    if top and not wanted:
        raise RequestError(f"top_logprobs={top}: is for logprobs=true only", "top_logprobs")
    return top if wanted else None


def _max_tokens(get, chat: bool, echo: bool) -> int | None:
    keys = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    given = [key for key in keys if get(key) is not None]
    if len(given) == 2:
        raise RequestError("max_tokens: is the old name of max_completion_tokens; give one of them", "max_tokens")
    if given and not echo and type(get(given[0])) is int and get(given[0]) == 0:
        more = "; 0 is for echo=true only" if not chat else ""
        raise RequestError(f"{given[0]}=0: must be an integer from 1 to {2**31 - 1}{more}", given[0])
    return _integer(get(given[0]), given[0], 0 if echo else 1, 2**31 - 1) if given else None


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(
            f"stop={_shown(value)}: must be a text, or a list of at most {MAX_STOPS}, none empty", "stop"
        )
    return tuple(stops)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise RequestError("stream_options: are for stream=true only", "stream_options")
    taken = {"include_usage", "include_obfuscation"}
    if not isinstance(value, dict) or not {key for key in value if value[key] not in (None, False)} <= taken:
        raise RequestError(f'stream_options={_shown(value)}: must be {{"include_usage": true}}', "stream_options")
    return _boolean(value.get("include_usage") or False, "stream_options.include_usage")


def _boolean(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{key}={_shown(value)}: must be true or false, not {_kind(value)}", key)
    return value


def _integer(value: Any, key: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{key}={_shown(value)}: must be an integer from {low} to {high}", key)
    return value


def _number(value: Any, key: str, low: float, high: float) -> float:
    # An integer may be too large for a float; NaN is in no range.
    if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
        raise RequestError(f"{key}={_shown(value)}: must be a number from {low} to {high}", key)
    return float(value)


def _top_p(value: Any) -> float:
    number = _number(value, "top_p", 0, 1)
    if number == 0:
        raise RequestError("top_p=0: must be above 0 and at most 1; temperature 0 is greedy", "top_p")
    return number


def _kind(value: Any) -> str:
    kinds = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
