"""`unspiral doctor --config`: what the user wrote is loaded as a run loads it, in seconds and without a
cluster."""

import io
import os
import re
import subprocess
import sys
import time

import pytest
from places import ROOT
from rich.console import Console

from services.common.errors import UserError
from trainer.commands.checks import doctor, doctor_parts, doctor_reward
from trainer.commands.checks.doctor import run_doctor, verdict
from trainer.commands.checks.findings import Finding
from trainer.commands.cli import main
from trainer.config.schema import load_config, parse_config
from trainer.session.own_parts import load_parts

PARTS = """
import threading

from services.rollout.worker.templates.lab import LabTemplate

from trainer.rewards import em

def brief(t):
    return em(t)

def half(t):
    return em(t) / 2

def same(t):
    return 1.0

def silent(t):
    em(t)

def broken(t):
    return {}["score"]

def hangs(t):
    threading.Event().wait()

def calc(content, question):
    return "5"

class Own(LabTemplate):
    pass

def away(t):
    try:
        raise ConnectionError("no judge")
    except ConnectionError:
        return None
    return 1.0

def inverted(t):
    return 1 - em(t)

def forgets(t):
    if em(t):
        return 1.0

def loses(t):
    if not em(t):
        return 0.0

def costly(t):
    return em(t) - 0.25 * t.searches

def counted(t):
    return em(t) / t.search_count

def within(t):
    def score():
        return 1.0
    score()
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write a configuration with parts of the user's own; returns its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "doctors_parts.py").write_text(PARTS)
    monkeypatch.delitem(sys.modules, "doctors_parts", raising=False)
    rows = [f'{{"question": "who is {n}?", "answer": "{n}"}}\n' for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    (tmp_path / "eval.jsonl").write_text("".join(rows[:2]) + '{"question": "when?", "answer": "now"}\n')

    def write(reward="brief", template="Own", tool="calc", held_out="eval"):
        file = tmp_path / "c.yaml"
        file.write_text(
            "{model: {path: ./model}, retriever: {corpus: 'lab:train_corpus:0'}, "
            f"data: {{train: train.jsonl, eval: {held_out}.jsonl}}, "
            f"reward: {{kind: 'doctors_parts:{reward}'}}, "
            f"rollout: {{template: 'doctors_parts:{template}', tools: {{calc: 'doctors_parts:{tool}'}}}}}}"
        )
        return file

    return write


def findings(file, **options):
    """(exit status, lines) of the doctor."""
    out = io.StringIO()
    status = run_doctor(file, Console(file=out, width=300), role="retriever", **options)
    return status, out.getvalue().splitlines()


def line(lines, what):
    return next(line for line in lines if line[6:].startswith(what))


def test_parts_that_are_there_are_loaded_and_held_out_questions_that_are_trained_on_are_told(config):
    _, lines = findings(config())
    assert line(lines, "reward.kind").startswith("ok ")
    assert line(lines, "reward.kind").endswith(
        "doctors_parts:brief: a right answer earns 1, a wrong one earns 0, none earns 0"
    )
    assert line(lines, "rollout.template").endswith("doctors_parts:Own: loaded")
    assert line(lines, "rollout.tools.calc").endswith("doctors_parts:calc: '5' for 'who is 0?'")
    assert line(lines, "prompts").startswith("note")  # there is no model yet
    assert line(lines, "held-out questions").endswith("2 of 3 of data.eval stand in data.train too")


def test_the_doctor_takes_changes_of_the_configuration_as_train_does(config, tmp_path, capsys):
    def doctor(*words):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--role", "retriever", *words])
        return ended.value.code, *capsys.readouterr()

    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "text": "a bridge"}\n')
    file = str(config())
    changed = ("data.train=corpus.jsonl", "retriever.corpus=./train.jsonl")
    status, out, _ = doctor("--config", file, *changed)
    said = " ".join(out.split())
    assert status == 3 and "these are columns of a corpus, not of questions: id, text" in said
    assert "BAD retriever.corpus ./train.jsonl" in said and "`question` makes it a question" in said
    status, out, _ = doctor("--config", file, "learner.lrr=1", "rollout.tools={Calc: 'a:b', calc: c}")
    said = " ".join(out.split())
    assert status == 2 and "learner.lrr: unknown key; did you mean learner.lr?" in said
    assert "rollout.tools.Calc: not the name of a tool" in said, "all are told"
    assert "rollout.tools.calc: expected an import path" in said
    assert "ok reward.kind" in said and "note held-out questions" in said, "the rest is checked"
    status, _, err = doctor("--config", file, "rollout.dtype=float64", "learner.lrr=1", "data={}")
    assert status == 2 and "data.train: required, and not given" in err, "nothing is left to check"
    status, _, err = doctor("learner.lr=1")
    assert status == 2 and "learner.lr=1 changes a configuration; give it by --config FILE" in err
    said = verdict([Finding("training", "good", "")], tmp_path / "c.yaml", ["run.name=a b"])
    assert said == f"ready for `unspiral train --config {tmp_path}/c.yaml 'run.name=a b'`"


@pytest.mark.parametrize(
    ("part", "key"),
    [("reward", "reward.kind"), ("template", "rollout.template"), ("tool", "rollout.tools.calc")],
)
def test_a_part_that_is_not_there_is_bad_and_says_what_is(config, part, key):
    status, lines = findings(config(**{part: "nope"}))
    assert status == 3 and line(lines, key).startswith("BAD")
    advice = lines[lines.index(line(lines, key)) + 1]
    assert "doctors_parts has no `nope`; it has: brief, half, same," in advice
    assert advice.lstrip().startswith(f"-> {key}")


@pytest.mark.parametrize(
    ("reward", "level", "says"),
    [
        ("half", "note", "an answer counts as right from 1 on, for metrics and LLDS; where yours earn less"),
        ("same", "note", "a wrong answer earns as much as counts as right (1)"),
        ("broken", "BAD", "on trajectory doctor-right: KeyError: 'score' ({}/doctors_parts.py, line 21)"),
        ("hangs", "BAD", "on trajectory doctor-right: no result within 0.5 s"),
        ("silent", "BAD", "it returns nothing: no `return` in it has a value; is one missing?"),
        ("within", "BAD", "it returns nothing: no `return` in it has a value; is one missing?"),
        (
            "inverted",
            "note",
            "a wrong answer and no answer earn more than a right answer, which is what a run would teach: "
            "check the reward's sign, and what it compares",
        ),
        (
            "forgets",
            "note",
            "it returned None or no finite number for a wrong answer and no answer: such trajectories are "
            "left out of the training; is a service that it asks away, or a `return` missing on that way? "
            "What earns nothing earns 0",
        ),
        ("loses", "note", "it returned None or no finite number for a right answer: such trajectories are"),
        ("same", "note", "all three earn the same, and nothing is learned of rewards that are equal"),
        ("counted", "BAD", "AttributeError: Trajectory has no `search_count`; it has: uid, group,"),
    ],
)
def test_the_reward_is_called_and_what_it_gives_or_raises_is_told(
    config, tmp_path, monkeypatch, reward, level, says
):
    monkeypatch.setattr(doctor_reward, "SECONDS", 0.5 if reward == "hangs" else 120.0)
    _, lines = findings(config(reward=reward))
    told = line(lines, "reward.kind")
    assert told.startswith(level)
    assert says.format(tmp_path) in lines[lines.index(told) + 1]


def test_a_reward_that_takes_long_for_a_whole_step_is_noted(monkeypatch):
    raw = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "retriever": {"corpus": "c"}}

    def slow(trajectory):
        time.sleep(0.05)
        return float("Italy" in trajectory.model_text)

    def told(**reward):
        found = doctor_reward.check_reward(parse_config(raw | {"reward": {"kind": "a:b", **reward}}), slow)
        return found.level, found.advice

    assert told() == ("good", "")
    monkeypatch.setattr(doctor_reward, "SLOW_SECONDS", 3.0)
    level, advice = told()
    assert level == "note" and re.fullmatch(
        r"a call took 0\.\d+ s, so those of the 80 trajectories of a step take \d+ s; reward\.concurrency "
        r"\(1 now\) lets as many calls run at a time",
        advice,
    )
    assert told(concurrency=8) == ("good", "")


def test_what_a_search_costs_is_told(config):
    _, lines = findings(config(reward="costly"))
    end = "a right answer earns 1, a wrong one earns 0, none earns 0; a right one after a search earns 0.75"
    assert line(lines, "reward.kind").endswith(end)


def test_a_judge_that_is_away_is_told_and_is_no_fault(config, tmp_path):
    (tmp_path / "train.jsonl").unlink()
    _, lines = findings(config(reward="away"))
    told = line(lines, "reward.kind")
    end = "a right answer is left out, a wrong one is left out, none is left out"
    assert told.startswith("note") and told.endswith(end)
    assert "the function returned None" in lines[lines.index(told) + 1]


@pytest.mark.parametrize(
    "change", [{"reward": "calc"}, {"reward": "Own"}, {"template": "brief"}, {"tool": "same"}]
)
def test_what_a_run_refuses_at_its_start_by_its_signature_the_doctor_refuses_too(config, change):
    file = config(**change)
    with pytest.raises(UserError) as e:
        load_parts(load_config(file, []))
    status, lines = findings(file)
    said = " ".join(" ".join(lines).split())
    assert status == 3 and str(e.value) in said and "expected a " in said


def test_the_prompts_are_made_with_the_models_tokenizer(config, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(doctor_parts.models, "check_folder", lambda folder, given: folder)
    asked = []
    monkeypatch.setattr(doctor_parts.tokenizer, "load_tokenizer", lambda folder: f"of {folder}")
    monkeypatch.setattr(doctor_parts.prompts, "check_prompts", lambda *given, trained: asked.append(given))
    monkeypatch.setattr(
        doctor_parts, "check_template", lambda key, path, *_: Finding(key, "good", f"{path}: tried")
    )
    _, lines = findings(config())
    assert line(lines, "prompts").endswith("made of the first 4 questions")
    assert line(lines, "rollout.template").endswith("doctors_parts:Own: tried")
    ((key, questions, tokenizer, _),) = asked
    assert (key, len(questions), tokenizer) == ("data.train", 4, "of model")


def test_the_verdict_is_about_the_configuration(tmp_path):
    good = [Finding("training", "good", "torch"), Finding("GPU", "note", "none")]
    assert verdict(good, tmp_path / "c.yaml") == f"ready for `unspiral train --config {tmp_path}/c.yaml`"
    bad = [*good, Finding("reward.kind", "bad", "x:y")]
    assert verdict(bad, tmp_path / "c.yaml") == "not ready: see reward.kind above"


def test_the_configuration_comes_first_and_of_the_machine_what_is_not_well(config, monkeypatch):
    machine = [
        Finding("Python", "good", "3.12"),
        Finding("disk", "good", "9 GiB"),
        Finding("GPU", "note", "none"),
    ]
    monkeypatch.setattr(doctor, "checks_of", lambda role: [lambda: iter(machine)])
    _, lines = findings(config())
    told = [line[6:].split()[0] for line in lines if line[:4] in ("ok  ", "note", "BAD ")]
    assert told[0] == "configuration" and told[-2:] == ["GPU", "machine"]
    assert line(lines, "machine").split(maxsplit=2)[2] == "2 more checks, all well: --all"
    _, lines = findings(config(), whole=True)
    told = [line[6:].split()[0] for line in lines if line[:4] in ("ok  ", "note", "BAD ")]
    assert told[0] == "configuration" and told[-3:] == ["Python", "disk", "GPU"]


def test_without_a_configuration_the_whole_machine_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "checks_of", lambda role: [lambda: iter([Finding("Python", "good", "3.12")])])
    assert [line.split() for line in findings(None)[1]] == [["ok", "Python", "3.12"]]


HANGS_IN_A_POOL = """
import asyncio, time
from concurrent.futures import ThreadPoolExecutor
async def tool(content, question): return await asyncio.to_thread(time.sleep, 600)
def reward(trajectory): return POOL.submit(time.sleep, 600).result()
POOL = ThreadPoolExecutor(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rollout.tools.t", "reward.kind"])
def test_the_doctor_ends_where_a_part_hangs_in_a_pool_of_its_own(part, tmp_path):
    """Python's own end waits for the threads of every pool. In a process of its own, which has to end."""
    (tmp_path / "hangs_in_a_pool.py").write_text(HANGS_IN_A_POOL)
    (tmp_path / "q.jsonl").write_text('{"question": "who is 1?", "answer": "1"}\n')
    own = {
        "rollout.tools.t": "rollout: {tool_timeout_seconds: 0.5, tools: {t: 'hangs_in_a_pool:tool'}}",
        "reward.kind": "reward: {timeout_seconds: 0.5, kind: 'hangs_in_a_pool:reward'}",
    }
    (tmp_path / "c.yaml").write_text(
        "{model: {path: ./model}, retriever: {corpus: 'lab:train_corpus:0'}, data: {train: q.jsonl}, "
        f"{own[part]}}}"
    )
    command = [sys.executable, "-m", "trainer", "doctor", "--config", "c.yaml", "--role", "retriever"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert line(done.stdout.splitlines(), part).startswith("BAD")
    assert "timeout_seconds=0.5" in done.stdout
