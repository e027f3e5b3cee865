"""Questions that stand in two files."""

import itertools
import json
import random

import pytest
from command_line import run  # noqa: F401

from trainer.data.checks.overlap import NEAR, twins
from trainer.rewards import normalize

TEN = "one two three four five six seven eight nine ten"


def write(file, questions):
    rows = [
        {"id": f"{file.stem}{i}", "question": text, "golden_answers": [answer]}
        for i, (text, answer) in enumerate(questions)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def files(tmp_path):
    held_out = [
        ("Who wrote the Iliad?", "Homer"),
        (TEN, "a"),
        (TEN.replace("ten", "eleven"), "b"),
        ("What is the capital of Peru?", "Lima"),
    ]
    train = [
        ("who wrote  iliad", "Homer"),
        (TEN.replace("one", "zero"), "a"),
        ("What is the capital of Chad?", "N'Djamena"),
    ]
    return write(tmp_path / "test.jsonl", held_out), write(tmp_path / "train.jsonl", train)


def test_the_same_question_and_near_ones_are_found_and_questions_of_one_form_are_not(files):
    found = twins(*files)
    assert [(t.question.id, t.other.id, t.answers_agree) for t in found] == [
        ("test0", "train0", True),
        ("test1", "train1", True),
    ]
    assert found[0].similarity == 1 and found[1].similarity == pytest.approx(9 / 11)


def test_the_command_lists_them_and_ends_with_2_for_the_same_ones_alone(run, files, tmp_path):
    status, out, err = run("data", "validate", str(files[0]), "--against", str(files[1]))
    assert status == 2 and err == f"unspiral: {files[0]}: 1 of 4 questions stand in {files[1]} too\n"
    assert f"same: {files[0]}, line 1 and {files[1]}, line 1: Who wrote the Iliad?" in out
    with files[1].open("a") as more:
        more.write('{"question": "where?"}\n')
    _, out, _ = run("data", "validate", str(files[0]), "--against", str(files[1]))
    assert f"{files[1]}: 1 of its 4 rows could not be compared, the first: {files[1]}, line" in out
    assert "1 question is the same, 1 near (at least 80% of the words; 1 of these" in out
    clean = write(tmp_path / "clean.jsonl", [(TEN.replace("two", "zero"), "x")])
    status, out, _ = run("data", "validate", str(clean), "--against", str(files[1]))
    assert status == 0 and "0 questions are the same, 1 near" in out


def test_no_near_pair_is_missed(tmp_path):
    """Against all pairs, on questions of few words, of which many are near."""
    rng = random.Random(0)
    made = [
        [(" ".join(rng.choices("abcdefghijklm", k=rng.randint(3, 12))), "x") for _ in range(120)]
        for _ in range(2)
    ]
    ours, theirs = (
        write(tmp_path / name, some) for name, some in zip(("a.jsonl", "b.jsonl"), made, strict=True)
    )
    words = [[set(normalize(text).split()) for text, _ in side] for side in made]
    expected = {
        f"a{i}"
        for (i, x), y in itertools.product(enumerate(words[0]), words[1])
        if len(x & y) / max(1, len(x | y)) >= NEAR
    }
    assert {t.question.id for t in twins(ours, theirs)} == expected and len(expected) > 10


def table(file, rows, columns="Frage;Antwort"):
    file.write_text("\n".join([columns, *rows]) + "\n")
    return file


def test_the_named_columns_count_in_both_files(run, tmp_path):
    mine = table(tmp_path / "q.csv", ["Wer schrieb Faust?;Goethe", "Wo liegt Rom?;Italien"])
    other = table(tmp_path / "other.csv", ["wer schrieb Faust;Goethe"])
    keys = ("--question-key", "Frage", "--answer-key", "Antwort")
    status, out, err = run("data", "validate", str(mine), *keys, "--against", str(other))
    assert status == 2 and err == f"unspiral: {mine}: 1 of 2 questions stand in {other} too\n"
    assert f"same: {mine}, line 2 and {other}, line 2: Wer schrieb Faust?" in out
    assert "1 question is the same, 0 near" in out and "could not be compared" not in out


def test_another_file_with_names_that_need_no_key_is_read_by_them(run, tmp_path):
    mine = table(tmp_path / "q.csv", ["Wo liegt Rom?;Italien"])
    other = write(tmp_path / "train.jsonl", [("wo liegt Rom", "Italien")])
    keys = ("--question-key", "Frage", "--answer-key", "Antwort")
    status, out, _ = run("data", "validate", str(mine), *keys, "--against", str(other))
    assert status == 2 and "1 question is the same" in out


def test_where_nothing_could_be_compared_there_is_no_all_clear(run, tmp_path):
    mine = write(tmp_path / "q.jsonl", [("Wer schrieb Faust?", "Goethe")])
    other = table(tmp_path / "other.csv", ["wer schrieb Faust;Goethe", "Wo liegt Rom?;Italien"])
    status, out, err = run("data", "validate", str(mine), "--against", str(other))
    assert status == 2 and "questions are the same" not in out and err.count("\n") == 1
    assert err.startswith(
        f"unspiral: --against {other}: none of its 2 rows could be compared, the first: {other}, line"
    )
    status, out, err = run("data", "validate", str(other), "--against", str(mine))
    assert status == 2 and "the same" not in out and "2 of 2 rows are malformed" in err


ODD = {"Frage": "who wrote it?", "Antwort": "Ada"}
USUAL = {"question": "who wrote it?", "golden_answers": ["Ada"]}
NAMED = ("--question-key", "Frage", "--answer-key", "Antwort")


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (ODD, USUAL),
        (USUAL, ODD),
        (ODD, ODD),
        ({"Frage": "who wrote it?", "answer": "Ada"}, {"question": "who wrote it?", "Antwort": "Ada"}),
    ],
    ids=["mine is odd", "the other is", "both are", "each by half"],
)
def test_a_key_counts_in_each_file_that_has_its_column(run, tmp_path, mine, other):
    files = [tmp_path / "mine.jsonl", tmp_path / "other.jsonl"]
    for file, row in zip(files, (mine, other), strict=True):
        file.write_text(json.dumps(row) + "\n")
    status, out, err = run("data", "validate", str(files[0]), *NAMED, "--against", str(files[1]))
    assert status == 2 and err == f"unspiral: {files[0]}: 1 of 1 questions stand in {files[1]} too\n", out
    assert f"against {files[1]}: 1 question is the same, 0 near" in out


def test_a_key_that_neither_file_has_is_a_mistake(run, tmp_path):
    for name in ("mine.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(json.dumps(USUAL) + "\n")
    mine, other = (str(tmp_path / name) for name in ("mine.jsonl", "other.jsonl"))
    status, _, err = run("data", "validate", mine, "--question-key", "Farge", "--against", other)
    assert status == 2 and "--question-key Farge: nothing is there; the columns are question, golden" in err
    (tmp_path / "other.jsonl").write_text(json.dumps(ODD) + "\n")  # without --against it is one too
    status, _, err = run("data", "validate", mine, *NAMED)
    assert status == 2 and "--question-key Frage: nothing is there" in err
