"""`unspiral trajectories` over a recorded run: in words, and token by token where the store has them."""

from __future__ import annotations

import json

import pytest
from command_line import run  # noqa: F401
from microscope_world import DOCUMENT, SHARED, trajectory

from services.common.printing.harmless import harmless, in_one_line
from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.records import StepRecord
from services.likelihood.store.sqlite.store import SQLiteStore

QUESTION = "Who founded Arl?"
SEARCH = "".join(SHARED)
HOSTILE = "\x1b[31mred\x07 \u202eback"


def record(uid, answer, reward, *, question=QUESTION, finish="answer", kinds=("search", "answer")):
    """A line of trajectories/*.jsonl: a search, its observation, and an answer."""
    segments = [
        {"by": "model", "kind": kinds[0], "text": SEARCH, "policy_version": 3, "documents": ["d7"]},
        {"by": "environment", "text": "<information> Arl was founded .. </information>"},
        {
            "by": "model",
            "kind": kinds[1],
            "text": f"<answer> {answer} </answer>",
            "policy_version": 3,
            "documents": None,
        },
    ]
    about = {"golden_answers": ["Ines Tobar"], "data_source": "towns", "worker": "w0.1", "finish": finish}
    return {
        "uid": uid,
        "group": uid[:-3],
        "question": question,
        "reward": reward,
        "segments": segments,
    } | about


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two steps, the second with tokens in the store, and an evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "config.yaml").write_text("run: {name: other}\nreward: {kind: em}\n")
    files = {
        "step_000001": [
            record("000001-0000-00", "Bo", 0.0),
            record("000001-0001-00", HOSTILE, None, question="x"),
        ],
        "step_000002": [
            record("000002-0000-00", "Ines Tobar", 1.0),
            record("000002-0000-01", "Bo", 0.0),
            record(
                "000002-0001-00", "Cy", 0.0, question="Where?", finish="length", kinds=("search", "invalid")
            ),
        ],
        "eval_after_greedy": [record("eval-0", "Ines Tobar", 1.0)],
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "trajectories" / f"{name}.jsonl").write_text(text + '{"uid": "torn')
    store = SQLiteStore(str(folder / "likelihood.db"))
    store.put_step("other", StepRecord(step=2))
    sampled = [
        trajectory("000002-0000-00", group="000002-0000", fall=0.2),
        trajectory("000002-0000-01", group="000002-0000", fall=0.6, answer="Bo", right=False),
    ]
    store.put_samples("other", 2, 0, [SampledTrajectory.model_validate(t) for t in sampled])
    store.close()
    return str(folder)


def test_show_prints_documents_scores_and_the_tokens_that_fell_most(run, recorded):
    status, out, _ = run("trajectories", "show", recorded, "--group", "000002-0000")
    assert status == 0 and "\x1b" not in out  # no terminal, no colours
    first, second = out.split("000002-0000-01")
    assert "right 1  answer, 1 search  -0.2" in first and "golden answers: Ines Tobar" in first
    assert SEARCH in first and "<answer> Ines Tobar </answer>" in first
    assert f"1. d7 Arl: {DOCUMENT['text']}" in first
    assert "scored answer: 'ines tobar', which equals 'ines tobar'" in first
    assert (
        "fell most: '</search>' -0.2400, ' Arl' -0.2300" in first
        and "; 100% of 5 tokens fell; LLDS pulls up 5" in first
    )
    assert "which equals none of them" in second and "advantage -0.7" in second
    status, out, _ = run("trajectories", "show", recorded, "1", "--limit", "1")
    assert "000001-0000-00  wrong 0" in out and "documents: d7" in out and "1 more; --limit" in out


def test_find_by_text_outcome_and_fall(run, recorded):
    def uids(*words):
        status, out, err = run("trajectories", "find", recorded, *words)
        assert status == 0, err
        return [
            word for line in out.splitlines() for word in line.split() if word.startswith(("0000", "eval-"))
        ]

    assert uids("--right") == ["000002-0000-00", "eval-0"]
    assert uids("--wrong", "--step", "2") == ["000002-0000-01", "000002-0001-00"]
    assert uids("--invalid") == uids("--truncated") == ["000002-0001-00"]
    assert uids("INES tobar", "--step", "eval_after_greedy") == ["eval-0"]
    assert uids("nowhere") == [] and uids("--source", "towns", "--limit", "2") == [
        "000001-0000-00",
        "000001-0001-00",
    ]
    assert uids("--falls") == ["000002-0000-01", "000002-0000-00"]
    status, out, err = run("trajectories", "find", recorded, "words that nobody wrote")
    assert (status, out) == (0, "") and err.endswith(": no trajectory fits\n")
    _, out, _ = run("trajectories", "find", recorded, "--right", "--json", "--step", "2")
    assert json.loads(out)["uid"] == "000002-0000-00"


def test_diff_shows_what_changed_for_one_prompt(run, recorded):
    status, out, _ = run("trajectories", "diff", recorded, "1", "2")
    assert status == 0
    assert "step_000001: 0 of 1 right by the reward: Bo" in out
    assert "step_000002: 1 of 2 right by the reward: Ines Tobar, Bo" in out
    assert "[-Bo-]{+Ines Tobar+}" in out
    status, _, err = run("trajectories", "diff", recorded, "1", "2", "--question", "Where")
    assert status == 2 and "no prompt that holds 'Where' in common" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "9"), "there are steps 1 to 2, eval_after_greedy"),
        (("show", "eval_after_gredy"), "did you mean eval_after_greedy?"),
        (("show", "1", "--uid", "x"), "step_000001: no trajectory x there"),
        (("find", "--falls", "--step", "1"), "store.trajectory_groups"),
    ],
)
def test_what_is_not_there_is_one_line_that_says_what_is(run, recorded, words, says):
    status, _, err = run("trajectories", words[0], recorded, *words[1:])
    assert status == 2 and says in err and err.count("\n") == 1


def test_text_of_models_does_not_act_on_the_terminal(run, recorded):
    _, out, _ = run("trajectories", "show", recorded, "1", "--uid", "000001-0001-00")
    assert "red" in out and not {"\x1b", "\x07", "\u202e"} & set(out)
    assert harmless("a\tb\nc\u200d\ud800") == "a\tb\nc\u200d\N{REPLACEMENT CHARACTER}"
    assert in_one_line("a\n b" * 1_000_000, 20) == "a ba ba ba ba ba ..."
