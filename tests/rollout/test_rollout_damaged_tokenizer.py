"""A damaged tokenizer is one line that names the model and what is expected."""

import json

import pytest

from services.common.errors import UserError
from services.rollout.worker.tokenizer import load_tokenizer


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"model": {"type": "no such"}}'])
def test_tokenizer_json_of_any_damage(tmp_path, kind, text):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError) as told:
        load_tokenizer(tmp_path)
    said = str(told.value)
    assert said.startswith(f"model.path {tmp_path}: no tokenizer could be loaded (expected tokenizer.json): ")
    assert "\n" not in said


def test_tokenizer_config_that_is_no_json(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"no tokenizer could be loaded .*JSONDecodeError"):
        load_tokenizer(tmp_path)
