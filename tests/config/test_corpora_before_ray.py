"""A malformed row of a corpus is told before Ray starts, wherever it stands, in the words of the doctor."""

import json

import pytest
from command_line import run  # noqa: F401

from services.common.errors import UserError
from trainer.commands.checks.doctor_files import check_files
from trainer.config.schema import load_config
from trainer.session.preflight import corpora
from trainer.session.preflight.retrievers import check_retrievers

GOOD = [json.dumps({"id": str(n), "contents": f"river {n}"}) for n in range(150)]
LISTS = "unspiral data validate corpus.jsonl lists all"
OUT = "retriever.skip_bad=true leaves such rows out"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write the corpus of these lines; returns the file of a configuration that names it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "q?", "golden_answers": ["a"]}\n')
    (tmp_path / "m").mkdir()
    text = "model: {path: m}\ndata: {train: q.jsonl}\nretriever: {corpus: corpus.jsonl}\n"
    (tmp_path / "mine.yaml").write_text(text)

    def of(*lines):
        (tmp_path / "corpus.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / "mine.yaml"

    return of


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            [*GOOD, '{"id": "x", "contents": 3}', "{"],
            ["corpus.jsonl, line 151: ", "; 2 of its 152 rows are malformed; ", LISTS, OUT],
        ),
        ([*GOOD, GOOD[7]], ["1 row has the id of an earlier one; ", LISTS, OUT]),
        (['{"id": "x"}'], ["corpus.jsonl, line 1: ", "; 1 of its 1 rows is malformed; ", LISTS]),
    ],
    ids=["malformed", "repeated", "none is left"],
)
def test_a_later_row_is_told_as_the_doctor_tells_it(mine, run, lines, says, tmp_path):
    file = mine(*lines)
    status, out, err = run("train", "--config", "mine.yaml")
    assert (status, out, err.count("\n")) == (2, "", 1) and all(one in err for one in says), err
    (found,) = [one for one in check_files(file, load_config(file)) if one.what == "retriever.corpus"]
    assert (found.level, err) == ("bad", f"unspiral: retriever.corpus: {found.advice}\n")
    assert not (tmp_path / "runs").exists()


def test_rows_that_are_to_be_left_out_stop_nothing_but_a_corpus_of_nothing_does(mine):
    skip = ["retriever.skip_bad=true"]
    check_retrievers(load_config(mine(*GOOD, "{", GOOD[7]), skip))
    with pytest.raises(UserError, match=r"^retriever\.corpus: corpus\.jsonl, line 1: .*is malformed; "):
        check_retrievers(load_config(mine('{"id": "x"}'), skip))


def test_a_corpus_without_rows_is_empty(mine):
    with pytest.raises(UserError, match=r"^retriever\.corpus: corpus\.jsonl: .*empty"):
        check_retrievers(load_config(mine()))


def test_the_reading_is_bounded_in_time(mine, monkeypatch):
    """What stands behind the rows that were read is left to the build."""
    monkeypatch.setattr(corpora, "READ_SECONDS", -1.0)
    check_retrievers(load_config(mine(*GOOD, "{")))
    with pytest.raises(UserError, match="; 1 of its first 99 rows is malformed; "):
        check_retrievers(load_config(mine("{", *GOOD)))
