"""The protocol of a plain `eval`, kept beside its answers, and what `eval compare` tells by it."""

import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run  # noqa: F401
from rollout_fakes import byte_bpe
from suite_rows import PROTOCOL, evaluation, trajectory_of

from services.common.errors import UserError
from services.common.runs.kept_answers import protocol_file
from services.contracts import Question
from trainer.commands.work import evaluate
from trainer.config.schema import parse_config
from trainer.suite.compare import compare
from trainer.suite.finished import load
from trainer.suite.rows import GREEDY, Asked
from trainer.suite.sets import Item

QUESTION = Question("q0", "which town is it?", ("Rome",), "quiz")
TOKENIZER = byte_bpe(["Question: which town is it? <answer> Rome </answer> "] * 3)


def kept(file, answer="Rome", about=None):
    one = trajectory_of(Asked(Item("q0", "quiz", QUESTION), GREEDY), answer)
    evaluate.keep_answers([one], file, about)
    return file


def asked(**protocol):
    return {"method": "agent", "model": {"name": "m", "weights": None}, "protocol": PROTOCOL | protocol}


def test_the_protocol_lies_beside_the_answers(tmp_path):
    names = {
        "answers.jsonl": "protocol.json",
        "b.answers.jsonl": "b.protocol.json",
        "c.jsonl": "c.protocol.json",
    }
    for answers, protocol in names.items():
        assert protocol_file(tmp_path / answers) == tmp_path / protocol


def test_plain_evaluations_are_compared_as_suites_are(tmp_path):
    a = kept(tmp_path / "a.answers.jsonl", about=asked())
    b = kept(tmp_path / "b.answers.jsonl", about=asked(versions={"torch": "2"}))
    assert compare(load(a), load(b))["warnings"] == []
    c = kept(tmp_path / "c.answers.jsonl", about=asked(template="mine:Brief", max_turns=2))
    assert compare(load(a), load(c))["warnings"] == [
        "protocol differs: template: search_r1 | mine:Brief",
        "protocol differs: max_turns: 4 | 2",
    ]
    suite = evaluation(tmp_path / "suite", {"nq": [True]}, top_k=5)
    rows = [json.loads(line) for line in (suite / "answers.jsonl").read_text().splitlines()]
    plain = tmp_path / "d.answers.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    protocol_file(plain).write_text(json.dumps(asked()))
    assert compare(load(suite), load(plain))["warnings"] == ["protocol differs: top_k: 5 | 3"]


def test_the_one_without_a_protocol_is_named(tmp_path, run):
    a = kept(tmp_path / "a.answers.jsonl", about=asked())
    b = kept(tmp_path / "b.answers.jsonl")
    assert compare(load(a), load(b))["warnings"] == [
        f"{b} keeps no protocol (NAME.protocol.json beside the answers): whether both were asked in the "
        "same way (template, limits, retriever) is not checked"
    ]
    protocol_file(b).write_text("{}")
    status, _, err = run("eval", "compare", str(a), str(b))
    assert (status, err) == (
        2,
        f"unspiral: {protocol_file(b)}: expected the method and protocol that `unspiral eval` writes\n",
    )


def test_new_answers_never_stand_beside_the_protocol_of_earlier_ones(tmp_path):
    file = kept(tmp_path / "answers.jsonl", about=asked())
    assert protocol_file(file).is_file()
    kept(file, "Oslo")
    assert not protocol_file(file).exists()


def test_eval_keeps_how_it_asked(tmp_path, monkeypatch):
    """All but the engine is real: the protocol says what moves numbers beside the weights."""
    serving = SimpleNamespace(
        tokenizer=TOKENIZER,
        eval_questions=[QUESTION],
        retriever_url="http://127.0.0.1:9",
        eval_retriever_url=None,
        pool=None,
    )

    @asynccontextmanager
    async def served(*_):
        yield serving

    async def answered(*_, **__):
        one = trajectory_of(Asked(Item("q0", "quiz", QUESTION), GREEDY), "Rome")
        return {"overall": {}, "sources": {"quiz": {}}}, [one]

    monkeypatch.setattr(evaluate, "served", served)
    monkeypatch.setattr(evaluate, "evaluate", answered)
    monkeypatch.setattr(evaluate, "weights_digest", lambda folder: "ab12")
    monkeypatch.setattr("trainer.data.models.resolve", Path)
    raw = {
        "model": {"path": "m"},
        "data": {"train": "t", "eval": "e"},
        "retriever": {"url": "http://127.0.0.1:9"},
        "rollout": {"max_turns": 3, "topk": 5},
        "seed": 7,
    }
    said = []
    evaluate.run_eval(parse_config(raw), answers=tmp_path / "x.answers.jsonl", say=said.append)
    about = json.loads((tmp_path / "x.protocol.json").read_text())
    assert (about["method"], about["model"]) == ("agent", {"name": "m", "weights": "ab12"})
    protocol = about["protocol"]
    assert (protocol["template"], protocol["max_turns"], protocol["top_k"]) == ("search_r1", 3, 5)
    assert protocol["retriever"]["backend"] == "unknown" and protocol["seed"] == 7
    assert QUESTION.text in protocol["prompt_example"] and "unspiral" in protocol["versions"]
    evaluate.run_eval(parse_config(raw), answers=tmp_path / "y.answers.jsonl", say=said.append)
    assert compare(*(load(tmp_path / f"{name}.answers.jsonl") for name in "xy"))["warnings"] == [
        "the retriever of neither told its backend, passages, corpus, encoder, which may differ"
    ]


def test_a_checkpoint_that_is_not_there_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = {"model": {"path": "m"}, "data": {"train": "t", "eval": "e"}, "retriever": {"url": "http://x"}}
    with pytest.raises(UserError, match="checkpoint nowhere: no such folder"):
        evaluate.run_eval(parse_config(raw), checkpoint="nowhere", answers=tmp_path / "x.answers.jsonl")


def test_answers_that_a_kill_cuts_short_are_never_beside_another_protocol(tmp_path, monkeypatch):
    """At no moment: whatever lies there once a rename or a removal has been the last thing that was done."""
    file = kept(tmp_path / "a.answers.jsonl", about=asked())
    before, seen = file.read_text(), []
    for owner, name in ((os, "replace"), (Path, "unlink")):
        real = getattr(owner, name)

        def watched(*arguments, real=real, **options):
            real(*arguments, **options)
            seen.append((file.read_text() == before, protocol_file(file).exists()))

        monkeypatch.setattr(owner, name, watched)
    kept(file, "Oslo")
    assert (False, True) not in seen and (True, False) in seen and seen[-1] == (False, False)
