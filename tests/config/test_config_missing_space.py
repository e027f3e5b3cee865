"""`{KEY:VALUE}` is to YAML a key without a value: the line says that a space is missing."""

import pytest

from services.common.errors import UserError
from trainer.config.schema import load_config

PATHS = "model: {path: m}\ndata: {train: q.jsonl}\nretriever: {corpus: c.jsonl}\n"


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(PATHS)
    return file


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ("rollout.tools={count:lamp.parts:calculator}", "rollout.tools: count", "lamp.parts:calculator"),
        ("rollout.tools={a: b.c:d, count:lamp.parts:f}", "rollout.tools: count", "lamp.parts:f"),
        ("model={path:x}", "model: path", "x"),
        ("algorithm={llds: {lambda:1}}", "algorithm.llds: lambda", "1"),
    ],
)
def test_a_mapping_that_is_given_without_a_space_is_told(file, given, key, expected):
    with pytest.raises(UserError) as told:
        load_config(file, [given])
    name = key.split()[-1]
    assert str(told.value) == (
        f"{key}:{expected}: a space is missing after the colon; expected {{{name}: {expected}}}"
    )


def test_so_is_one_in_the_file(file):
    file.write_text(PATHS + "rollout: {tools: {count:lamp.parts:calculator}}\n")
    with pytest.raises(UserError) as told:
        load_config(file)
    line = file.read_text()[: file.read_text().index("rollout:")].count("\n") + 1
    key = "rollout.tools: count:lamp.parts:calculator"
    assert str(told.value).startswith(f"{file}, line {line}: {key}: a space is missing ")


def test_a_key_without_a_value_and_a_mapping_with_spaces_stay_what_they_are(file):
    assert load_config(file, ["data={train: q.jsonl, eval: }"]).data.eval is None
    tools = load_config(file, ["rollout.tools={count: lamp.parts:calculator}"]).rollout.tools
    assert tools == {"count": "lamp.parts:calculator"}
