"""Chat templates: where they are found, and prompts that equal those of transformers."""

import json

import pytest

pytest.importorskip("jinja2", reason="the extra serve: pip install 'taco-jax[serve]'")

from taco_jax.config import ConfigError
from taco_jax.inference.serving.chat import Chat
from taco_jax.inference.serving.engine_types import RequestError
from taco_jax.inference.templates import Template, read_template

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system_message + '\\n' if loop.first and system_message is defined else '') }}
        {{- message.content + ' [/INST]' }}
    {%- else %}
        {% generation %}{{- ' ' + message.content | tojson + eos_token }}{% endgeneration %}
    {%- endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %} tools {%- endif %} {{ strftime_now('%Y') | length }}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = [
    [{"role": "user", "content": 'Hi <b>"you"</b> & é 😀'}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": 'ü "b"\n'}, {"role": "user", "content": "c"}],
]


@pytest.mark.parametrize("source", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_prompts_equal_those_of_transformers(source):
    transformers = pytest.importorskip("transformers", reason="the reference: pip install 'taco-jax[test]'")
    from tokenizers import Tokenizer, models

    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    for messages in CHATS:
        options = {"chat_template": source, "tokenize": False, "add_generation_prompt": True}
        want = reference.apply_chat_template(messages, **options)
        assert Chat(Template(source, TOKENS)).prompt(messages) == want and messages[0]["content"].strip() in want


def test_where_a_template_is_found(tmp_path):
    assert read_template(tmp_path) is None
    config = {"chat_template": "one", "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "x": 3}
    write = lambda **changes: (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | changes))
    write()
    assert read_template(tmp_path) == ("one", TOKENS)
    write(chat_template=[{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}])
    assert read_template(tmp_path) == ("three", TOKENS)
    (tmp_path / "chat_template.jinja").write_text("four")
    assert read_template(tmp_path) == ("four", TOKENS)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config.json: is no JSON file"):
        read_template(tmp_path)


@pytest.mark.parametrize(
    "source, message",
    [
        (LLAMA, "template refuses them: Conversation roles must alternate"),
        ("{{ messages[7].content + 1 }}", "template refuses them"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{% for %}", "the model's chat template cannot be read .*; /v1/completions works"),
        (None, "hold no chat template; /v1/completions works"),
    ],
)
def test_refusals(source, message):
    chat = Chat(source and Template(source, TOKENS))
    with pytest.raises(RequestError, match=message) as caught:
        chat.prompt([{"role": "assistant", "content": "a"}])
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_the_template_of_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the extra gguf: pip install 'taco-jax[gguf]'")
    from taco_jax.inference.gguf import _Fields, _template

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_chat_template(CHATML)
    writer.add_token_list(["<s>", "a", "</s>"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = _Fields(tmp_path / "a.gguf", gguf.GGUFReader(tmp_path / "a.gguf"))
    assert _template(fields) == (CHATML, TOKENS)
