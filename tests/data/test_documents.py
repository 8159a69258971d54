"""The token that ends documents: what the flags or the data's folders say, else one line."""

import dataclasses
import json

import pytest

from taco_jax.config import ConfigError, DataConfig, ModelConfig, TrainConfig
from taco_jax.data.documents import end_token


def folder(path, content):
    path.mkdir()
    (path / "meta.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def config(train, **changes) -> TrainConfig:
    return TrainConfig(data=DataConfig(train=train, document_mask=True, **changes), model=ModelConfig(vocab_size=300))


def test_the_folder_says_it(tmp_path):
    name = folder(tmp_path / "a", {"end_token": {"text": "<end>", "id": 299}})
    assert end_token(config(name)) == 299
    assert end_token(config(name, end_token_id=5)) == 5
    assert end_token(dataclasses.replace(config(name), data=DataConfig(train=name))) is None
    folder(tmp_path / "b:0.7", {"end_token": {"text": "<end>", "id": 7}})
    assert end_token(config(f"{name}:0.7")) == 299  # a weight
    assert end_token(config(str(tmp_path / "b:0.7"))) == 7  # a name


@pytest.mark.parametrize(
    "content, message",
    [
        ({"end_token": {"text": "<end>", "id": 300}}, "end with token 300, which must be below model.vocab_size=300"),
        ({"end_token": {"text": "<end>"}}, "must say the id of the token that ends documents, as end_token.id"),
        ({"end_token": {"id": True}}, "must say the id"),
        ({"end_token": None}, "must say the id"),
        ("{", "must say the id"),
    ],
)
def test_a_folder_that_does_not(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        end_token(config(folder(tmp_path / "a", content)))
    assert "\n" not in str(error.value)


def test_data_without_a_folder_s_word():
    with pytest.raises(ConfigError, match="data.train='austen' is no prepared folder .*; set data.end_token_id"):
        end_token(config("austen"))


def test_folders_that_differ(tmp_path):
    names = [folder(tmp_path / name, {"end_token": {"id": i}}) for i, name in enumerate("ab")]

    class Several:  # of sources with weights
        document_mask, end_token_id, train = True, None, tuple(f"{name}:0.5" for name in names)

    several = type("Config", (), {"data": Several, "model": ModelConfig()})
    with pytest.raises(ConfigError, match=r"end with different tokens \(.*a 0, .*b 1\)"):
        end_token(several)
    Several.train = (f"{names[0]}:0.5", names[0])
    assert end_token(several) == 0
