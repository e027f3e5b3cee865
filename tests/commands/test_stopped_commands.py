"""`eval`, `warm-start` and `export` that a signal ends, whenever it comes: a line, the status of the signal,
and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from end_to_end import command, finish
from runs import all_gone, ray_processes, until
from test_trainer_warm_start import byte_model, config_of, write_world

from services.common.processes.signals import Stopped, cancelled
from trainer.commands.work import evaluate
from trainer.commands.work import runs as commands
from trainer.commands.work.warm_start import write_whole
from trainer.learner.checkpoint import written_aside

NUMBERS = [signal.SIGINT, signal.SIGTERM]
SECONDS = 60
"""Bound of a wait that fails."""


@pytest.fixture
def unheard():
    """A signal that nobody listens for fails the test, and does not end pytest."""

    def fail(number, frame):
        raise AssertionError(f"nobody listens for {signal.Signals(number).name}")

    before = {number: signal.signal(number, fail) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_before_anything_is_started_removes_the_exported_weights(
    number, tmp_path, monkeypatch, unheard
):
    """While the suite reads the weights for their digest, say."""
    monkeypatch.setattr(evaluate, "find", lambda checkpoint, run, say: tmp_path / "step_1")
    monkeypatch.setattr(evaluate, "differing", lambda found, config: [])
    monkeypatch.setattr(evaluate, "export_checkpoint", lambda found, out: Path(out).mkdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = []

    async def score(model, scratch):
        assert model.is_dir() and scratch.parent == tmp_path
        os.kill(os.getpid(), number)
        await asyncio.wait_for(asyncio.Event().wait(), SECONDS)

    with pytest.raises(Stopped) as e:
        evaluate.with_weights(SimpleNamespace(run_dir=tmp_path), "latest", said.append, score)
    assert e.value.exit_code == 128 + number and said[-1] == f"{number.name}: finishing up"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_a_checkpoint_is_exported_leaves_nothing(number, tmp_path, monkeypatch, unheard):
    def export(found, out):
        with written_aside(Path(out)) as aside:
            (aside / "model.safetensors").write_text("half")
            os.kill(os.getpid(), number)
            raise AssertionError("the signal was not heard")

    monkeypatch.setattr(commands, "find", lambda checkpoint, say: tmp_path / "step_1")
    monkeypatch.setattr(commands, "export_checkpoint", export)
    with pytest.raises(Stopped) as e:
        commands.export("latest", tmp_path / "out")
    assert e.value.exit_code == 128 + number and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_the_model_is_written_lets_it_be_written_whole(number, tmp_path, unheard):
    stopping = threading.Event()
    out = tmp_path / "out"
    said = []

    def export(path, asked):
        os.kill(os.getpid(), number)
        assert stopping.wait(SECONDS)
        path.write_text("whole")

    def say(line):
        said.append(line)
        stopping.set()

    async def run():
        async with cancelled(say):
            await write_whole(SimpleNamespace(export_hf=export), out, say)

    with pytest.raises(Stopped) as e:
        asyncio.run(run())
    assert e.value.exit_code == 128 + number and out.read_text() == "whole"
    assert said == [f"{number.name}: finishing up", f"written to {out}"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of a tiny model on vLLM, with questions and a corpus."""
    folder = tmp_path_factory.mktemp("stopped")
    write_world(folder)
    made = config_of(byte_model(folder / "model"), folder).model_dump(mode="json", by_alias=True)
    made["rollout"]["engine"] = "vllm"
    file = folder / "config.yaml"
    file.write_text(json.dumps(made))
    return file


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "number", "loads"),
    [("eval", signal.SIGTERM, "ray::RolloutWorker"), ("warm-start", signal.SIGINT, "ray::RankActor")],
)
def test_a_signal_while_the_engine_loads_ends_the_command(name, number, loads, config, tmp_path):
    out = tmp_path / "out"
    of_its_own = {
        "eval": ("--data", config.parent / "train.jsonl", "--answers", out),
        "warm-start": ("--out", out, "--questions", 12),
    }
    process = command(name, "--config", config, *of_its_own[name])
    try:
        until(lambda: ray_processes(process, loads), process)
        ours = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        code, said = finish(process)
    finally:
        process.kill()  # where it never came to load its engine
    assert code == 128 + number, said
    left = {"eval": "no scores were written", "warm-start": f"no model was written to {out}"}[name]
    assert said.rstrip().splitlines()[-1] == f"unspiral: stopped by {number.name}; {left}"
    assert "Traceback" not in said
    assert f"{number.name}: finishing up" in said and all_gone(ours, 30) == []
    assert not out.exists() and list(tmp_path.glob("**/*aside*")) == []
