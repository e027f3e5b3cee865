"""`data validate --json`: the same findings and exit status, as one object."""

import json

import pytest
from command_line import fresh_folder, run  # noqa: F401

from services.common.files import write_json

GOOD = {"id": "a", "question": "who wrote it?", "golden_answers": ["Ada"], "data_source": "mine"}


def lines(file, *rows):
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


@pytest.fixture
def validated(run):
    """Runs it with and without --json: exit status, the object, the lines, the error line."""

    def call(*arguments):
        status, out, err = run("data", "validate", *arguments)
        again, text, same = run("data", "validate", *arguments, "--json")
        assert (again, same) == (status, err)
        return status, json.loads(text), out, err

    return call


def test_questions(validated, tmp_path):
    lines(tmp_path / "q.jsonl", GOOD, GOOD, {"question": "who?"}, {"query": "where?", "answer": "the"})
    status, found, out, err = validated("q.jsonl")
    assert status == 2 and "1 of 4 rows are malformed" in err
    assert (found["file"], found["kind"], found["questions"], found["malformed"]) == (
        "q.jsonl",
        "questions",
        3,
        1,
    )
    assert found["sources"] == {"mine": 2, "q": 1}
    (problem,) = found["problems"]
    assert problem.startswith("q.jsonl, line 3: ") and problem in out
    assert list(found["reasons"].values()) == [1]
    assert found["read_from"][1] == {"question": "query", "answers": "answer", "rows": 1}
    assert [len(found[name]) for name in ("repeated", "same_ids", "emptied", "odd")] == [1, 1, 1, 0]
    assert found["repeated"][0] in out


def test_questions_of_another_file(validated, tmp_path):
    lines(tmp_path / "q.jsonl", GOOD, {"question": "one two three four five six", "answer": "x"})
    lines(tmp_path / "t.jsonl", GOOD, {"question": "one two three four five six seven", "answer": "x"}, "bad")
    status, found, _, _ = validated("q.jsonl", "--against", "t.jsonl")
    against = found["against"]
    assert status == 2 and (against["file"], against["rows"], len(against["not_compared"])) == (
        "t.jsonl",
        3,
        1,
    )
    assert against["same"] == [
        {"question": "who wrote it?", "place": "q.jsonl, line 1", "other_place": "t.jsonl, line 1"}
    ]
    (near,) = against["near"]
    assert (near["other_place"], near["answers_agree"]) == ("t.jsonl, line 2", True)
    assert near["similarity"] == pytest.approx(6 / 7) and near["other"].endswith("seven")


def test_a_corpus(validated, tmp_path):
    rows = [{"id": "1", "text": "a bridge"}, {"id": "1", "text": "a bridge"}, {"id": "2", "text": ""}]
    lines(tmp_path / "c.jsonl", *rows)
    status, found, _, err = validated("c.jsonl")
    assert status == 2 and "--skip-bad" in err
    assert (found["kind"], found["passages"], found["malformed"]) == ("corpus", 2, 1)
    assert (found["same_ids"], found["same_texts"], found["numbered"]) == (1, 1, False)
    assert found["problems"][0].startswith("c.jsonl, line 3: ")


def test_an_index(validated, run, tmp_path):
    lines(tmp_path / "c.jsonl", {"id": "1", "contents": '"Work"\nAda wrote it.'})
    lines(
        tmp_path / "q.jsonl", GOOD, GOOD | {"id": "b", "question": "who made it?", "golden_answers": ["Eve"]}
    )
    assert run("index", "build", "c.jsonl", "-o", "i")[0] == 0
    status, found, _, _ = validated("q.jsonl", "--index", "i")
    index = found["index"]
    assert (status, index["folder"], index["topk"]) == (0, "i", 3)
    assert index["by_source"] == {"mine": {"asked": 2, "found": 1, "verdicts": 0}}
    assert index["misses"] == [{"id": "b", "question": "who made it?", "best": ""}]
    assert index["places"] == {"1": 1}


def test_what_cannot_be_read_at_all_is_an_error_without_an_object(run, tmp_path):
    write_json(tmp_path / "q.json", [])
    status, out, err = run("data", "validate", "q.json", "--json")
    assert (status, out) == (2, "") and err.count("\n") == 1
