"""What the benchmark of weight sync on GPUs judges and waits for; once whole, over gloo on CPUs."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_sync
from benchmarks.gpu import rollout as gpu_rollout
from benchmarks.gpu.sync.agreeing import DRIFT, NOISE, SMALL, Look, agree, drift_of
from benchmarks.gpu.sync.world import World
from services.common.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_each_look_is_judged_by_its_own_noise():
    """The noise of one look excuses no other, and no drift."""
    noisy = Look(0.14, 0.1)
    assert noisy.mark == pytest.approx(NOISE * 0.1) and Look(0.0, None).mark == SMALL
    assert agree([noisy, Look(0.145, 0.1)])
    assert not agree([noisy, Look(0.145, 0.09)])
    assert not agree([Look(0.014, 0.005), Look(0.021, 0.005)]), "above its mark, whatever the last one's"
    drifting = [Look(0.1, 0.1), Look(0.1 + 1.1 * DRIFT, 0.1)]
    assert all(look.mean < look.mark for look in drifting) and not agree(drifting)
    assert drift_of(drifting) == pytest.approx(1.1 * DRIFT)
    assert agree(drifting[::-1]), "nearer than at first is no drift"


async def test_a_learner_that_starts_is_waited_for_where_the_workers_fail():
    """It starts in a thread, which nothing can cancel; to close it meanwhile is a fault of its own."""
    failed, goes_on = threading.Event(), threading.Event()
    closed_at = []

    class Half(World):
        def __init__(self):
            self.up = False

        async def _start_workers(self):
            failed.set()
            raise RuntimeError("no room")

        async def start_learner(self, **learner):
            await asyncio.to_thread(goes_on.wait, 30)
            self.up = True

        async def __aexit__(self, *error):
            closed_at.append(self.up)

    async def work():
        async with Half() as world:
            await world.start()

    working = asyncio.create_task(work())
    await asyncio.to_thread(failed.wait, 30)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not working.done() and closed_at == []
    goes_on.set()
    with pytest.raises(RuntimeError, match="no room"):
        await asyncio.wait_for(working, 30)
    assert closed_at == [True]


def test_agreement_takes_an_eager_engine_where_it_is_told_to(tmp_path, monkeypatch):
    made = []

    def stop(size, folder, *, eager):
        made.append(eager)
        raise UserError("enough")

    monkeypatch.setattr(gpu_sync, "make_model", stop)
    for eager in (False, True):
        options = argparse.Namespace(model=None, sizes=["tiny"], eager=eager)
        with pytest.raises(UserError):
            asyncio.run(gpu_sync.agreement(options, tmp_path, 1))
    assert made == [False, True]


def test_no_round_begins_after_the_seconds_of_a_rollout_measurement(tmp_path, monkeypatch, capsys):
    """The clock goes on by one second with each round."""
    clock = SimpleNamespace(now=0.0)

    class Worker:
        def __init__(self, *args, **options):
            pass

        async def start(self):
            pass

        async def rollout(self, request):
            pass

        async def close(self):
            pass

    async def one_round(worker, taken, way, repeat, temperature, places):
        clock.now += 1.0
        return {"tokens_per_s": 10.0 + repeat, "turns": 1.0}

    monkeypatch.setattr(gpu_rollout, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(gpu_rollout, "served", lambda corpus: nullcontext("http://nowhere"))
    monkeypatch.setattr(gpu_rollout, "RolloutWorker", Worker)
    monkeypatch.setattr(gpu_rollout, "_round", one_round)
    (tmp_path / "train.jsonl").write_text('{"question": "who?", "golden_answers": ["a"]}\n')
    parser = argparse.ArgumentParser()
    gpu_rollout.arguments(parser)
    given = ["--model", "m", "--data", str(tmp_path), "--repeats", "4", "--ways", "asynchronous", "--seconds"]
    for seconds, rounds in (("0", None), ("2", [10.0, 11.0]), ("3600", [10.0, 11.0, 12.0, 13.0])):
        out = gpu_rollout.run(parser.parse_args([*given, seconds]))
        rows = out.get("asynchronous")
        assert (rows and [row["tokens_per_s"] for row in rows]) == rounds
        said = f"no round begins after {seconds} s" in capsys.readouterr().out
        assert said == (seconds != "3600")
        assert len(gpu_rollout.table(out).splitlines()) == (2 if rounds else 1)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loss_is_measured_in_turns_over_gloo(tmp_path):
    """Another has the turn until all have started: nothing is measured before it is given back."""
    turns, place, out = tmp_path / "turns", tmp_path / "models", tmp_path / "out.json"
    command = [
        *("-m", "benchmarks.gpu_sync", "loss", "--sizes", "tiny", "--stages", "2", "--workers", "1"),
        *("--backend", "gloo", "--device", "cpu", "--engine", "transformers", "--timeout", "10"),
        *("--blows", "killed", "--turns", str(turns), "--place", str(place), "--out", str(out)),
        *("--limit", "480"),
    ]
    with turns.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said = []
            up = {"workers up": False, "learner up": False}
            for line in process.stdout:
                said.append(line)
                up = {what: seen or what in line for what, seen in up.items()}
                if all(up.values()):
                    break
            assert all(up.values()), "".join(said)
            assert [p.name[:18] for p in place.iterdir()] == ["unspiral-gpu-sync-"]
            assert not any(line.startswith("RESULT") for line in said)
            fcntl.flock(held, fcntl.LOCK_UN)
            said += process.stdout.readlines()
            assert process.wait(60) == 0, "".join(said)
        finally:
            process.kill()
            process.wait()
    hows = [row["how"] for row in json.loads(out.read_text())["results"]]
    assert hows == ["none, first", "none, the same weights", "killed"]
    assert list(place.iterdir()) == [], "the models are removed"
