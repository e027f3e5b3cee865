"""The end of the demo: one question before and after, and what to try next."""

import json
import shlex
from pathlib import Path

import typer
from places import ROOT

from services.likelihood.cli import _store_of
from trainer.commands.cli import app
from trainer.lab.before_after import before_after, next_commands


def kept(run, when, rows):
    folder = run / "trajectories"
    folder.mkdir(exist_ok=True)
    lines = []
    for i, (reward, *segments) in enumerate(rows):
        texts = [
            {"by": "model", "text": text, "documents": ["d"]}
            if "<search>" in text
            else {"by": "model", "text": text}
            for text in segments
        ]
        record = {"uid": f"eval-{when}-greedy-{i:06d}", "question": f"q{i}?", "golden_answers": ["a", "b"]}
        lines.append(json.dumps(record | {"reward": reward, "segments": texts}) + "\n")
    (folder / f"eval_{when}_greedy.jsonl").write_text("".join(lines))


def test_the_question_shown_is_one_that_was_learnt_with_the_most_searches(tmp_path):
    find = "<search> x </search>"
    kept(tmp_path, "before", [(1.0, "<answer> a </answer>"), (0.0, "hm"), (0.0, "")])
    kept(
        tmp_path,
        "after",
        [(1.0, find, find, find), (1.0, find, "a"), (1.0, find, find, "<answer>\na </answer>")],
    )
    assert before_after(tmp_path) == [
        "one question: q2?  (answer: a or b)",
        "  before:",
        "    (nothing)",
        "    -> wrong, 0 searches",
        "  after:",
        f"    {find}",
        f"    {find}",
        "    <answer> a </answer>",
        "    -> right, 2 searches",
    ]


def test_nothing_learnt_shows_the_first_and_nothing_kept_shows_nothing(tmp_path):
    assert before_after(tmp_path) == []
    kept(tmp_path, "before", [(0.0, "hm"), (0.0, "hm")])
    kept(tmp_path, "after", [(0.0, "hm"), (0.0, "hm")])
    assert before_after(tmp_path)[0].startswith("one question: q0?")


def test_what_to_try_next_are_four_commands_that_exist():
    index = Path("runs/demo-0/eval_retriever_index")
    made = next_commands(Path("runs/demo-0"), index)
    assert len(made) == 4
    command = typer.main.get_command(app)
    for line in made:
        words = shlex.split(line, comments=True)
        assert words[0] == "unspiral" and words[1] in command.commands


def test_the_question_that_was_shown_is_asked_where_its_answer_stands(tmp_path):
    kept(tmp_path, "before", [(0.0, "hm")])
    kept(tmp_path, "after", [(1.0, "a")])
    asked = shlex.split(next_commands(tmp_path, tmp_path / "held_out")[0], comments=True)
    assert asked[2:] == ["--checkpoint", str(tmp_path), "--retriever", str(tmp_path / "held_out"), "q0?"]


def test_the_live_page_of_the_run_can_be_seen_again(tmp_path):
    (tmp_path / "likelihood.db").touch()
    (line,) = [line for line in next_commands(tmp_path, tmp_path) if "its live page again" in line]
    *command, option, store = shlex.split(line, comments=True)
    assert command == ["unspiral", "serve", "likelihood"] and option == "--store"
    assert _store_of(store) == str(tmp_path / "likelihood.db")


def test_the_readme_shows_what_the_demo_prints():
    shown = (ROOT / "README.md").read_text()
    shown = shown[shown.index("\nnext:\n") :]
    (page,) = [line for line in next_commands(Path("runs/demo-0"), Path("i")) if " serve likelihood " in line]
    assert f"  .venv/bin/{page}\n" in shown[: shown.index("```")]
