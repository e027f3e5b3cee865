"""`unspiral data validate` on questions that contradict each other, and cells that hold several answers."""

import json

import pytest
from command_line import run  # noqa: F401

from trainer.data.lists_in_texts import several_in
from trainer.data.questions import validate

ROWS = """question,answers
Who kept A?,Anna; Bob
Who kept B?,Bob
who kept b,BOB
Who kept B?,Carla
Who kept C?,"[""Anna"", ""Bob""]"
Who kept D?,+
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_questions_that_contradict_each_other_are_shown_with_both_answers_in_the_order_of_lines(
    run, tmp_path
):
    (tmp_path / "q.csv").write_text(ROWS)
    status, out, err = run("data", "validate", "q.csv")
    assert (status, err) == (0, "") and out.splitlines() == [
        'q.csv, line 2: \'Anna; Bob\' is read as one answer; several are written ["Anna", "Bob"]',
        "q.csv, line 4: the same question as q.csv, line 3: who kept b",
        "q.csv, line 5: the same question as q.csv, line 3, with another answer (Carla; there Bob): "
        "Who kept B?",
        "q.csv, line 7: of the answer '+' scoring by em, f1 and subem leaves nothing",
        "q             6",
        "total         6",
        "in 6 rows the question was read from `question` and the answers from `answers`",
        "1 row has a golden answer of which scoring by em, f1 and subem leaves nothing",
        "2 questions repeat one that stands before",
        "1 question contradicts an earlier one: they have no answer in common, and at most one can be learnt",
        "1 row seems to hold several answers in one text, which is read as one answer; write them as a JSON "
        'list, such as ["Anna", "Bob"], or with <|answer_split|> between them',
    ]
    found = json.loads(run("data", "validate", "q.csv", "--json")[1])
    assert len(found["repeated"]) == 2 and len(found["contradicting"]) == 1
    assert found["several_answers"] == [out.splitlines()[0]]


def test_ten_lines_of_each_kind_are_shown_so_that_none_hides_another(run, tmp_path):
    same = "Who kept A?,Anna\n" * 31
    (tmp_path / "q.csv").write_text(f"question,answers\n{same}Who kept B?,+\n")
    shown = run("data", "validate", "q.csv")[1].splitlines()
    assert shown[10].startswith("q.csv, line 33: of the answer '+'")
    assert shown[11] == "... and 20 more, counted below; --json lists all"


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("Anna; Bob", ["Anna", "Bob"]),
        ("Anna|Bob|", ["Anna", "Bob"]),
        ("Anna\nBob; Carla", ["Anna", "Bob; Carla"]),
        ("Paris, France", ["Paris, France"]),
        ("Anna;", ["Anna"]),
        ("It was built by Anna in the year of the great flood, as they say; Bob", None),
    ],
)
def test_what_may_be_several_answers(answer, parts):
    assert several_in(answer) == (parts or [answer])


def test_a_list_is_several_answers_already(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "who?", "answers": ["a; b", "c"]}\n')
    assert validate(tmp_path / "q.jsonl").several == []


def test_notes_of_a_corpus_are_in_the_order_of_lines(run, tmp_path):
    rows = ["id,text", "1,a", "2,cafÃ©", "1,b", f"3,{'word ' * 1001}", "4,a"]
    (tmp_path / "c.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    shown = run("data", "validate", "c.csv")[1].splitlines()
    assert [line.split(":")[0] for line in shown[:4]] == [f"c.csv, line {n}" for n in (3, 4, 5, 6)]
