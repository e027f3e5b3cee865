"""Files in Latin-1: every reader says the same, and how to mend it."""

import gzip
import json

import pytest
from command_line import run  # noqa: F401

from retriever_service.index_folder.corpus import Skipped, read_corpus
from services.common.errors import UserError
from trainer.data.questions import load_questions

SAYS = "not UTF-8 text; save the file as UTF-8, such as by `iconv -f latin1 -t utf-8 {} > NEW`"


def files_of(good, bad):
    """By name: the same two records, of which the second has a letter beyond ASCII."""
    rows = [json.dumps(row, ensure_ascii=False) for row in (good, bad)]
    values = [[",".join(v) if isinstance(v, list) else v for v in row.values()] for row in (good, bad)]
    tables = {
        name: "\n".join(sign.join(line) for line in (good, *values)) + "\n"
        for name, sign in {"a.csv": ",", "a.tsv": "\t"}.items()
    }
    return {"a.jsonl": "\n".join(rows) + "\n", "a.json": f"[{', '.join(rows)}]\n"} | tables


QUESTIONS = files_of(
    {"question": "who?", "golden_answers": ["x"]}, {"question": "Øre?", "golden_answers": ["y"]}
)
PASSAGES = files_of({"id": "1", "contents": "one"}, {"id": "2", "contents": "Øre"})
PLACES = {"a.jsonl": ", line 2: ", "a.json": ", row 2: ", "a.csv": ", line 3: ", "a.tsv": ", line 3: "}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_in_latin_1_are_refused_with_the_command_that_mends_them(name, tmp_path, run):
    path = tmp_path / name
    path.write_bytes(QUESTIONS[name].encode("latin-1"))
    line = f"{path}{PLACES[name]}{SAYS.format(path)}"
    with pytest.raises(UserError) as e:
        load_questions(path)
    assert str(e.value).startswith(line)
    status, out, err = run("data", "validate", str(path))
    assert status == 2 and line in out and "1 of 2 rows" in err


@pytest.mark.parametrize("name", PASSAGES)
def test_a_corpus_in_latin_1_is_refused_without_the_advice_to_lose_passages(name, tmp_path, run):
    path = tmp_path / name
    path.write_bytes(PASSAGES[name].encode("latin-1"))
    status, _, err = run("index", "build", "--corpus", str(path), "--out", str(tmp_path / "index"))
    assert status == 2 and f"{path}{PLACES[name]}{SAYS.format(path)}" in err
    assert "--skip-bad" not in err and "surrogates" not in err and "expected {" not in err
    status, out, err = run("data", "validate", str(path))
    assert status == 2 and f"{path}{PLACES[name]}{SAYS.format(path)}" in out and "iconv" not in err
    skipped = Skipped()
    assert [p.id for p in read_corpus(path, skip_bad=True, skipped=skipped)] == ["1"]
    assert skipped.count == 1


def test_a_header_in_latin_1_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("question,golden_answers,größe\nwho?,x,1\n".encode("latin-1"))
    with pytest.raises(UserError, match="line 1: not UTF-8 text; save"):
        load_questions(path)


def test_of_a_packed_file_the_command_unpacks_it(tmp_path):
    path = tmp_path / "a b.jsonl.gz"
    path.write_bytes(gzip.compress(QUESTIONS["a.jsonl"].encode("latin-1")))
    with pytest.raises(UserError, match=r"`gzip -dc '/.*a b\.jsonl\.gz' \| iconv -f latin1 -t utf-8 > NEW`"):
        load_questions(path)
