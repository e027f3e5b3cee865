"""`unspiral eval --suite` as a whole: real retriever, real workers, killed in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from end_to_end import command, finish
from runs import kill, run_config, until

from trainer.suite.rows import read_rows
from trainer.suite.sets import SETS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = 12
"""Of each set."""
ANSWERS = 2 * 7 * ROWS
"""A greedy and a sampled one of each row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("suite")


def seven_sets(files, folder: Path) -> Path:
    """The laboratory's questions as a FlashRAG folder."""
    questions = [json.loads(line) for line in Path(files.eval_questions).read_text().splitlines()]
    for i, name in enumerate(SETS):
        (folder / "sets" / name).mkdir(parents=True)
        rows = [
            {key: question[key] for key in ("id", "question", "golden_answers")}
            for question in questions[i :: len(SETS)][: 2 * ROWS]
        ]
        file = folder / "sets" / name / "test.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "sets"


def test_killed_and_gone_on_with_by_two_workers_the_answers_are_those_of_one(files, folder):
    sets = seven_sets(files, folder)

    def evaluate(out, workers):
        config = run_config(files, folder, f"run-{out}", rollout={"workers": workers})
        rows = ("--limit-per-source", ROWS, "--samples", 1)
        arguments = ("--suite", "search7", "--data", sets, *rows, "--out", folder / out)
        return command("eval", "--config", config, *arguments)

    code, out = finish(evaluate("one", 1))
    assert code == 0, out
    assert f"NQ: test, {ROWS} of {2 * ROWS}, seed 0, {ROWS} questions" in out and "| EM | " in out

    process = evaluate("two", 2)
    answers = folder / "two" / "answers.jsonl"
    until(lambda: answers.exists() and answers.read_bytes().count(b"\n") >= ROWS, process)
    kill(process)
    kept = len(read_rows(answers))
    assert ROWS <= kept < ANSWERS, "it was killed too late"
    code, out = finish(evaluate("two", 2))
    assert code == 0 and f"{kept} of {ANSWERS} answers are there already" in out, out

    one, two = (
        {(r["key"], r["sample"]): r for r in read_rows(folder / x / "answers.jsonl")} for x in ("one", "two")
    )
    assert len(one) == ANSWERS and one == two
    assert any(one[key, 0]["text"] != one[key, 1]["text"] for key, _ in one), (
        "samples are no copies of the greedy"
    )
    tables = [(folder / x / "table.md").read_text() for x in ("one", "two")]
    assert tables[0] == tables[1]
    result = json.loads((folder / "two" / "result.json").read_text())
    right = [row["scores"]["em"] for (_, sample), row in two.items() if sample == 1]
    assert result["sampled"]["mean"]["averages"]["micro"]["mean"] == pytest.approx(sum(right) / len(right))
    assert result["n"] == 7 * ROWS and "| Sampled mean EM | " in tables[0]
    protocol = result["protocol"]
    assert protocol["retriever"]["backend"] == "bm25" and protocol["template"] == "lab"
