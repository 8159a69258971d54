"""The token that ends documents: what the flags or the data's folders say, else one line."""

import dataclasses

import pytest
import token_writers as write

from taco_jax.config import ConfigError, DataConfig, ModelConfig, TrainConfig
from taco_jax.data.sources import end_token


def folder(path, end):
    return str(write.prepared(path, [[1, end]], end=end, vocab_size=max(300, end + 1)))


def config(*train, **changes) -> TrainConfig:
    data = DataConfig(train=train[0] if len(train) == 1 else train, document_mask=True, **changes)
    return TrainConfig(data=data, model=ModelConfig(vocab_size=300))


def test_the_folder_says_it(tmp_path):
    name = folder(tmp_path / "a", 299)
    assert end_token(config(name)) == 299
    assert end_token(config(name, end_token_id=5)) == 5
    assert end_token(dataclasses.replace(config(name), data=DataConfig(train=name))) is None
    folder(tmp_path / "b:0.7", 7)
    assert end_token(config(str(tmp_path / "b:0.7"))) == 7  # a name
    same = folder(tmp_path / "c", 299)
    assert end_token(config(f"{name}:0.5", f"{same}:0.5")) == 299


def test_a_model_without_the_token(tmp_path):
    message = "documents end with token 300, which must be below model.vocab_size=300"
    with pytest.raises(ConfigError, match=message):
        end_token(config(folder(tmp_path / "a", 300)))


def test_data_without_a_folder_s_word(tmp_path):
    for train in (("austen",), (folder(tmp_path / "a", 3), "austen")):
        message = "data.train='austen' is no prepared folder .*; set data.end_token_id"
        with pytest.raises(ConfigError, match=message) as error:
            end_token(config(*train))
        assert "\n" not in str(error.value)


def test_folders_that_differ(tmp_path):
    with pytest.raises(ConfigError, match=r"/b: its documents end with .* \(id 1\), those of .*a with .* \(id 0\)"):
        end_token(config(folder(tmp_path / "a", 0), folder(tmp_path / "b", 1)))
