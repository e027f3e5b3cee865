"""`unspiral ask`: from a name to an agent, and what the terminal shows."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import subprocess
import sys
import termios
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from command_line import run  # noqa: F401
from places import ROOT
from rich.console import Console

from services.common.errors import UnspiralError, UserError
from services.common.files import write_json
from services.contracts import Action, Question, Trajectory
from services.rollout.worker.watching import Observed, Restarted, Retrieved, Searching, Writing
from tests.agent.agent_world import FIRST, HITS, LAST, QUESTION
from tests.retriever.retriever_fixtures import small_index  # noqa: F401
from trainer.commands.agent import source
from trainer.commands.agent.cli import question_and_changes
from trainer.commands.agent.source import agent_spec, curves_of, named, retriever_url
from trainer.commands.agent.transcript import Transcript
from trainer.config.schema import parse_config
from trainer.session.resuming.rules import without_secrets

TINY = (
    "rollout.engine=transformers",
    "rollout.template=lab",
    "rollout.max_model_tokens=128",
    "rollout.max_turns=2",
)
SET = [word for setting in TINY for word in ("--set", setting)]


def checkpoint(run_folder: Path, **retriever) -> Path:
    """A checkpoint as far as its settings are read."""
    raw = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "seed": 5,
        "retriever": retriever or {"corpus": "/gone.jsonl"},
        "rollout": {"template": "lab", "topk": 2},
    }
    folder = run_folder / "checkpoints" / "step_000004"
    folder.mkdir(parents=True)
    settings = without_secrets(parse_config(raw).model_dump(mode="json", by_alias=True))
    write_json(folder / "state.json", {"identity": {"settings": settings}})
    (run_folder / "metrics.jsonl").write_text("{}\n")
    return folder


def test_a_checkpoint_of_a_run_knows_the_way_to_the_runs_curves(tmp_path):
    given = str(checkpoint(tmp_path / "my run"))
    assert curves_of(named(given, [])).command == f"unspiral serve likelihood --store '{tmp_path}/my run'"
    served = curves_of(named(given, ["store.url=http://likelihood:8100/"]))
    assert (served.url, served.command) == ("http://likelihood:8100/#runs=my%2520run", None)
    redis = curves_of(named(given, ["store.url=redis://r:6379/0"]))
    assert redis.command == "unspiral serve likelihood --store redis://r:6379/0"


def test_a_checkpoint_brings_the_settings_that_it_was_trained_under(tmp_path):
    found = named(str(checkpoint(tmp_path / "mine")), ["rollout.topk=7"])
    assert (found.name, found.run) == ("mine/step_000004", tmp_path / "mine")
    rollout = found.config.rollout
    assert (rollout.template, rollout.topk, found.config.seed) == ("lab", 7, 5)
    with pytest.raises(UserError, match=r"rollout.topkk: unknown key; did you mean rollout.topk\?"):
        named(str(tmp_path / "mine" / "checkpoints" / "step_000004"), ["rollout.topkk=7"])


def test_the_retriever_is_the_one_given_then_the_run_s_own(tmp_path, small_index):
    with ExitStack() as parts:
        own = named(str(checkpoint(tmp_path / "corpus")), [])
        assert retriever_url(own, "http://there:1", parts, print) == "http://there:1"
        with pytest.raises(UserError, match=r"the run's own index, .*corpus/retriever_index, is not there"):
            retriever_url(own, None, parts, print)
        os.symlink(small_index, tmp_path / "corpus" / "retriever_index")
        assert retriever_url(own, None, parts, print).startswith("http://127.0.0.1:")
        served = named(str(checkpoint(tmp_path / "url", url="http://r:8000")), [])
        assert retriever_url(served, None, parts, print) == "http://r:8000"
        secret = named(str(checkpoint(tmp_path / "secret", url="http://me:word@r:8000")), [])
        with pytest.raises(UserError, match="is kept without its password"):
            retriever_url(secret, None, parts, print)
        index = named(str(checkpoint(tmp_path / "index", index=str(small_index))), [])
        said = []
        retriever_url(index, None, parts, said.append)
        assert said == [f"retriever on {small_index}"]


def two_passages(query, topk):
    return [("n1\nriver n2", 2.0), ("n3\nborn n4", 1.0)][:topk]


def test_a_run_with_a_retriever_of_the_user_s_own_is_asked_with_it(tmp_path):
    own = named(str(checkpoint(tmp_path / "own", index=f"{__name__}:two_passages")), [])
    said = []
    with ExitStack() as parts:
        url = retriever_url(own, None, parts, said.append)
        found = httpx.post(f"{url}/retrieve", json={"queries": ["river?"], "topk": 1}, trust_env=False).json()
    assert said == [f"retriever on {__name__}:two_passages"]
    assert found["result"][0][0]["contents"] == "n1\nriver n2"


@pytest.mark.parametrize(
    ("index", "given", "told"),
    [
        ("gone", None, "the run's own index, gone, is not there"),
        ("gone", "nowhere", "index nowhere"),
        ("no_such_module:search", None, "retriever.index=no_such_module:search: cannot be imported: No mod"),
    ],
)
def test_what_is_wrong_with_the_retriever_is_told_before_the_weights_are_read(tmp_path, index, given, told):
    where = str(checkpoint(tmp_path / "run", index=index))
    said = []
    with ExitStack() as parts, pytest.raises(UnspiralError) as refused:
        agent_spec(where, given, [], None, parts, said.append)
    assert told in str(refused.value) and said == []


def test_a_run_whose_own_code_is_not_here_is_told_by_key_with_what_else_is_missing(tmp_path, monkeypatch):
    where = str(checkpoint(tmp_path / "run", index="no_such_module:search"))
    monkeypatch.setattr(source, "find_spec", lambda name: None if name == "torch" else object())
    with ExitStack() as parts, pytest.raises(UserError) as refused:
        agent_spec(where, None, [], None, parts, print)
    line = str(refused.value)
    assert "; the key is of the configuration of run/" in line and "; and torch is not installed; " in line
    with (
        ExitStack() as parts,
        pytest.raises(UserError, match=r"^--retriever=no_such_module:f: cannot be imp"),
    ):
        agent_spec(where, "no_such_module:f", [], None, parts, print)
    with (
        ExitStack() as parts,
        pytest.raises(UserError, match=r"^rollout.tools.calc=no_such_module:f: cannot"),
    ):
        agent_spec(where, "http://r:1", ["rollout.tools={calc: no_such_module:f}"], None, parts, print)


def test_a_model_s_folder_needs_a_retriever(model):
    with ExitStack() as parts, pytest.raises(UserError, match="--retriever is missing"):
        agent_spec(model, None, [], None, parts, print)
    with ExitStack() as parts:
        spec = agent_spec(model, "http://r:1", list(TINY), 9, parts, print)
        assert (spec.model_path, spec.retriever_url, spec.seed) == (model, "http://r:1", 9)


def test_a_question_is_answered_on_the_terminal_and_as_json(run, model, search, monkeypatch):
    ask = ("ask", "--checkpoint", model, "--retriever", search.url, *SET)
    status, out, err = run(*ask, "--logprobs", QUESTION)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("<search> n") and lines[0].endswith(" </search>")
    assert "1 document in " in lines[1] and lines[2].startswith("  1. n") and "born n3 river n4" in lines[2]
    assert lines[3].startswith("<answer> n") and lines[4].startswith("answer: n")
    assert "action 0 (search): mean log-prob" in out and "' </answer>'" in out
    assert "\x1b" not in out and "loading" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n\n{QUESTION}\n"))
    status, out, err = run(*ask, "--json")
    first, second = map(json.loads, out.splitlines())
    assert first["segments"] == second["segments"] and first["finish"] == "answer"
    assert lines[4].startswith(f"answer: {first['answer']}  (1 search, ")
    assert first["searches"][0]["documents"][0]["text"] == "born n3 river n4"
    assert len(first["segments"][0]["token_ids"]) == len(first["segments"][0]["logprobs"])
    status, _, err = run(*ask, " ")
    assert (status, err) == (2, "unspiral: ask: the question is empty\n")


@pytest.mark.slow
def test_a_signal_while_the_model_loads_ends_it_with_one_line(model, search):
    words = [sys.executable, "-m", "trainer", "ask", "--checkpoint", model, "--retriever", search.url, *SET]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (line := process.stderr.readline()).startswith("loading"):
            assert line, "it has ended"
        process.terminate()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (143, "", "unspiral: stopped by SIGTERM\n")


@pytest.mark.slow
def test_on_a_terminal_it_asks_for_question_after_question_until_ctrl_c(model, search):
    """By a terminal of the system's own."""
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "trainer", "ask", "--checkpoint", model, "--retriever", search.url, *SET]
    root = ROOT
    environment = os.environ | {"PYTHONPATH": f"{root}", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        words,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=root,
        env=environment,
        # The terminal's own, which Ctrl-C reaches.
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(follower, termios.TIOCSCTTY, 0)),
    )
    os.close(follower)
    seen = ""
    try:
        for answers in (1, 2):
            while "\n? " not in seen.rpartition("answer: ")[2]:
                seen += os.read(leader, 4096).decode(errors="replace")
            os.write(leader, f"{QUESTION}\n".encode())
            while seen.count("answer: ") < answers:
                seen += os.read(leader, 4096).decode(errors="replace")
        while "\n? " not in seen.rpartition("answer: ")[2]:
            seen += os.read(leader, 4096).decode(errors="replace")
        os.write(leader, b"\x03")
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert "\x1b[36m<search>" in seen and "\x1b[1;32m" in seen


def told(events, end, **options):
    """What a transcript prints of these events."""
    out = io.StringIO()
    transcript = Transcript(Console(file=out, width=60, highlight=False, **options))
    for event in events:
        transcript.tell(event)
    transcript.end(end)
    return out.getvalue()


def test_a_transcript_shows_notices_restarts_and_no_escape_codes():
    question = Question("q", "who?", (), "ask")
    bad = Action([1], [-1.0], 0, "invalid", "\x1b[2J hm")
    last = Action([6], [-0.125], 0, "answer", LAST)
    end = Trajectory("u", "u", question, [7], [bad, last], "answer", seconds=1.0)
    events = [
        Writing("<think> lost"),
        Restarted(),
        Writing(bad.text),
        Observed("My previous action is invalid."),
        Writing(LAST[:30]),
        Writing(LAST),
    ]
    shown = told(events, end)
    assert "once more from the start" in shown and "My previous action is invalid." in shown
    assert "\x1b" not in shown and "[2J hm" in shown
    assert shown.count("Shakespeare") == 2 and "answer: Shakespeare  (0 searches, 2 tokens, 1.00 s)" in shown
    unfinished = Trajectory("u", "u", question, [7], [bad], "turns", seconds=1.0)
    assert "no answer: no turn is left (0 searches, 1 token," in told([Writing(bad.text)], unfinished)


def test_a_transcript_prints_text_once_whatever_the_pieces():
    question = Question("q", "who?", (), "ask")
    search_action = Action([1], [-1.0], 0, "search", FIRST, query="Hamlet", document_ids=["d1"])
    end = Trajectory(
        "u", "u", question, [7], [search_action, Action([6], [-0.1], 0, "answer", LAST)], "answer"
    )
    whole = [
        Writing(FIRST),
        Searching("Hamlet"),
        Retrieved("Hamlet", HITS, 0.25),
        Observed("x"),
        Writing(LAST),
    ]
    pieces = [
        *(Writing(FIRST[:n]) for n in range(1, len(FIRST) + 1)),
        *whole[1:4],
        *(Writing(LAST[:n]) for n in range(1, len(LAST) + 1)),
    ]
    plain = told(whole, end)
    assert told(pieces, end) == plain
    assert plain.splitlines()[0] == FIRST and "1. Hamlet: a play by <b>Shakespeare</b>" in plain
    assert "\nx\n" not in plain  # of a search the documents are shown, and not the observation


@pytest.mark.parametrize(
    ("words", "question", "changes"),
    [
        (
            ["who wrote Hamlet?", "rollout.topk=5", "seed=3"],
            "who wrote Hamlet?",
            ["rollout.topk=5", "seed=3"],
        ),
        (["rollout.topk=5", "who?"], "who?", ["rollout.topk=5"]),
        (["rolout.topk=5"], None, ["rolout.topk=5"]),  # of which the configuration says that it is no key
        (["what is x if x=5"], "what is x if x=5", []),
        (["x=5"], "x=5", []),
        ([], None, []),
    ],
)
def test_a_question_and_changes_stand_side_by_side(words, question, changes):
    assert question_and_changes(words) == (question, changes)


def test_changes_are_given_to_ask_as_to_train_and_by_set_too(run, tmp_path):
    asked = ("ask", "--checkpoint", str(checkpoint(tmp_path / "mine")), "--retriever", "nowhere")
    for changes in (["rollout.topk=0"], ["--set", "rollout.topk=0"]):
        status, _, err = run(*asked, "who?", *changes)
        assert status == 2 and "rollout.topk" in err, changes
    status, _, err = run(*asked, "who", "wrote", "Hamlet?")
    assert (status, err) == (2, "unspiral: ask: 3 questions; quote the question: 'who wrote Hamlet?'\n")
