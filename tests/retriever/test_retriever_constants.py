"""NaN and infinities, which Python's json and pandas write into lines: a corpus that `data validate` reads is
one that `index build` reads."""

import json

import pytest

from retriever_service.index_folder.corpus import read_corpus
from services.common.errors import UserError
from trainer.commands.cli import main


def test_a_row_with_constants_is_validated_built_and_found(tmp_path, capsys):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        '{"id": "1", "contents": "old bridge", "place": "x", "year": NaN, "height": -Infinity}\n'
    )
    for command in (
        ["data", "validate", str(corpus)],
        ["index", "build", str(corpus), "--out", f"{corpus}.index"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0, capsys.readouterr().err
    (passage,) = read_corpus(corpus)
    assert (passage.contents, passage.fields) == ("old bridge", {"place": "x"})


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "1", "contents": "bridge \\ud800", "year": NaN}',
        '{"id": "1", "contents": "bridge", "year": NaN',
        '{"id": "NaN", "contents": bridge}',
    ],
    ids=["lone surrogate", "torn", "no text"],
)
def test_what_is_no_json_beside_them_is_still_refused(tmp_path, line):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": "bridge"}) + f"\n{line}\n")
    with pytest.raises(UserError, match=r"c\.jsonl, line 2: not JSON"):
        list(read_corpus(corpus))
