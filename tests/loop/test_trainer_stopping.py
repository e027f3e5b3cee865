"""How a run ends before its time: signals, a lost learner, a step cut short. Scripted steps on a real run
folder, real signals."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from test_trainer_monitor_actions import Pool, Scripted, events, rollback, system

from services.common.errors import UserError
from services.common.processes import signals
from trainer.learner.checkpoint import CheckpointNotWritten, drop_after, latest, step_folder
from trainer.learner.group import LearnerError
from trainer.session import run as runs
from trainer.session import stopping
from trainer.session.on_ray.watch import RayLost
from trainer.session.stopping import StopSignals


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two signals that a test sends one after the other are two."""
    monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.01)


class Halting(Scripted):
    """At one step something happens between the update and the step's record."""

    def __init__(self, system, at, halt, wants=None):
        super().__init__(system, wants or {})
        self.at, self.halt = at, halt

    async def one_step(self, step):
        if step == self.at:
            self.step, self.version = step, self.version + 1
            self.checkpointable = False
            self.unfinished = step
            await self.halt(self)
            self.version -= 1
        return await super().one_step(step)


def checkpoints(made):
    return sorted(p.name for p in (made.folder.path / "checkpoints").glob("step_*"))


async def listened(driver):
    """The driver's run under its signals, as `train` does it."""
    with driver.stop as stop:
        try:
            await driver.run()
            stop.settle()
        except asyncio.CancelledError:
            raise signals.Stopped(stop.number) from None


async def send(number):
    os.kill(os.getpid(), number)
    await asyncio.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_ends_the_run_after_the_step_in_hand_with_its_checkpoint(tmp_path, number, code):
    made = system(tmp_path)
    driver = Halting(made, 3, lambda d: send(number))
    with pytest.raises(signals.Stopped) as caught:
        asyncio.run(listened(driver))
    assert caught.value.exit_code == code
    assert made.folder.last_step() == 3 and checkpoints(made) == ["step_000002", "step_000003"]


def test_a_second_signal_cuts_the_step_short_and_nothing_half_done_is_saved(tmp_path):
    made = system(tmp_path)

    async def twice(driver):
        await send(signal.SIGTERM)
        await send(signal.SIGINT)
        raise AssertionError("goes on after the second signal")

    with pytest.raises(signals.Stopped) as caught:
        asyncio.run(listened(Halting(made, 4, twice)))
    assert caught.value.exit_code == 143  # the first one's
    assert made.folder.last_step() == 3 and checkpoints(made) == ["step_000002"]


def test_a_step_that_does_not_end_within_the_grace_is_cut_short(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 0.05)
    made = system(tmp_path)

    async def stuck(driver):
        await send(signal.SIGTERM)
        await asyncio.sleep(30)

    with pytest.raises(signals.Stopped):
        asyncio.run(listened(Halting(made, 4, stuck)))
    assert checkpoints(made) == ["step_000002"]


def test_the_grace_ends_with_the_step(tmp_path):
    """Its timer must not cut what comes after: the checkpoint."""
    made, timers = system(tmp_path), []
    save = made.learner.save

    def watched(path, state):
        timers.append(driver.stop._timer)
        save(path, state)

    async def halted(driver):
        await send(signal.SIGTERM)
        timers.append(driver.stop._timer)

    made.learner.save = watched
    made.config.trainer.checkpoint_every = 0
    driver = Halting(made, 3, halted)
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    in_the_step, in_the_save = timers
    assert in_the_step.cancelled() and in_the_save is None
    assert checkpoints(made) == ["step_000003"]


@pytest.mark.parametrize("signal_first", [True, False])
def test_of_two_limits_of_a_step_the_shorter_one_holds_and_ends_with_the_step(tmp_path, signal_first):
    """A signal and Ray's death in one step: a timer that is left over would cut what comes after."""
    said = []

    async def both():
        with StopSignals(said.append) as stop:
            asks = [
                lambda: stop.receive(signal.SIGTERM),
                lambda: stop.end_soon(OSError("Ray has died"), 0.05),
            ]
            with stop.step_in_hand():
                for ask in asks if signal_first else asks[::-1]:
                    ask()
            await asyncio.sleep(0.15)  # the step came to its end in time
            with stop.step_in_hand(), pytest.raises(asyncio.CancelledError):
                for ask in asks[1:]:
                    stop.error = None
                    ask()
                await asyncio.sleep(30)

    asyncio.run(both())
    assert "the step is not done after 0.05 s: stopping" in said
    assert sum("not done" in line for line in said) == 1


@pytest.mark.parametrize("when", ["in the step", "in the save"])
def test_the_grace_does_not_cut_the_checkpoint_that_is_due_after_the_step(tmp_path, monkeypatch, when):
    """The save would go on in the learner, and be asked for once more."""
    monkeypatch.setattr(stopping, "STEP_GRACE_SECONDS", 1.0)
    made, asked, over = system(tmp_path), [], threading.Event()
    save, end_of_grace = made.learner.save, StopSignals._end_of_grace

    def ends(stop, *of):
        end_of_grace(stop, *of)
        over.set()

    def slow(path, state):
        asked.append(path.name)
        if when == "in the save":  # no grace begins, so nothing ends it
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait(1.5)
        else:
            assert over.wait(60)
        save(path, state)

    monkeypatch.setattr(StopSignals, "_end_of_grace", ends)
    made.learner.save = slow
    driver = Halting(made, 2, lambda d: send(signal.SIGTERM)) if when == "in the step" else Scripted(made, {})
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    assert asked == checkpoints(made) == ["step_000002"] and made.folder.last_step() == 2


def test_a_signal_while_the_last_steps_are_saved_waits_for_them(tmp_path):
    made = system(tmp_path)
    save = made.learner.save

    def slow(path, state):
        if path.name == "step_000012":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        save(path, state)

    made.learner.save = slow
    made.config.trainer.checkpoint_every = 5
    driver = Scripted(made, {})

    async def run():
        with pytest.raises(signals.Stopped):
            await listened(driver)
        return checkpoints(made)  # when the run's parts are ended, the learner among them

    assert asyncio.run(run()) == ["step_000005", "step_000010", "step_000012"]


def test_where_no_step_is_in_hand_the_first_signal_ends_the_run_at_once(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {})

    async def evaluate(tag):
        await send(signal.SIGTERM)
        raise AssertionError("goes on after the signal")

    driver.evaluations.run, driver.config.trainer.eval_at_ends = evaluate, True
    with pytest.raises(signals.Stopped):
        asyncio.run(listened(driver))
    assert driver.trace == []


def test_signals_do_not_cut_the_clean_end_short(tmp_path):
    async def ends():
        with StopSignals(print) as stop:
            stop.settle()
            await send(signal.SIGTERM)
            return "whole"

    assert asyncio.run(ends()) == "whole"


def test_a_closed_terminal_ends_a_run_cleanly_but_not_under_nohup(tmp_path):
    async def ends():
        with StopSignals(print) as stop:
            try:
                await send(signal.SIGHUP)
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                return stop.number
            return "goes on"

    assert signals.Stopped(signal.SIGHUP).exit_code == 129
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        assert asyncio.run(ends()) == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert asyncio.run(ends()) == "goes on"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_left_that_would_end_the_process_later(tmp_path):
    async def ends():
        with StopSignals(print) as stop:
            stop.abort(RuntimeError("stuck"))
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(10)
            stop.settle()

    asyncio.run(ends())
    assert not [
        t for t in threading.enumerate() if isinstance(t, threading.Timer) and not t.finished.is_set()
    ]


def test_a_lost_learner_is_not_asked_to_save(tmp_path):
    made, saved = system(tmp_path), []
    made.config.trainer.max_restores = 0
    made.learner.save = lambda path, state: saved.append(path.name)

    async def lost(driver):
        raise LearnerError("learner rank 0 of 1 died (update)")

    with pytest.raises(LearnerError, match="died"):
        asyncio.run(Halting(made, 3, lost).run())
    assert saved == ["step_000002"]


def test_a_learner_lost_in_a_save_is_not_asked_again(tmp_path):
    made, asked = system(tmp_path), []
    made.config.trainer.max_restores = 0

    def save(path, state):
        asked.append(path.name)
        raise LearnerError("learner rank 0 of 1 died (save)")

    made.learner.save = save
    with pytest.raises(LearnerError, match="died"):
        asyncio.run(Scripted(made, {}).run())
    assert asked == ["step_000002"]


def test_a_disk_that_takes_no_checkpoint_ends_the_run_and_not_its_learner(tmp_path):
    """Else the steps since the last one would be taken again, `trainer.max_restores` times, to fail at the
    same place."""
    made, asked = system(tmp_path), []

    def save(path, state):
        asked.append(path.name)
        raise CheckpointNotWritten(f"{path} cannot be written: No space left on device")

    made.learner.save = save
    with pytest.raises(CheckpointNotWritten) as caught:
        asyncio.run(Scripted(made, {}).run())
    assert caught.value.exit_code == 3 and asked == ["step_000002"] and made.learner.starts == 0


def test_a_rollback_cut_short_is_not_saved_as_the_step_it_left(tmp_path):
    made = system(tmp_path)
    driver = Scripted(made, {5: rollback(5, 4)})

    def load(path):
        raise KeyError("cut short")

    made.learner.load = load
    with pytest.raises(KeyError):
        asyncio.run(driver.run())
    assert checkpoints(made) == ["step_000002", "step_000004"]


# -- train(): what a run leaves, however it ends


def started(made, monkeypatch, driver_class=Scripted):
    """`train` over the scripted system: a new pool at each start."""

    @asynccontextmanager
    async def start(config, model, folder, say, *, own, identity, resumed):
        made.config, made.folder, made.pool = config, folder, Pool()
        made.identity = identity
        made.reward, made.metrics = own.reward, own.metrics
        made.learner.model_path = model
        yield made

    monkeypatch.setattr(runs, "start_system", start)
    monkeypatch.setattr(runs.models, "resolve", Path)
    monkeypatch.setattr(runs, "Driver", lambda s, progress, stop: driver_class(s, {}))


def summary(made):
    return json.loads((made.folder.path / "summary.json").read_text())


def trained(made, **options):
    out = io.StringIO()
    result = runs.train(made.config, console=Console(file=out, width=200), **options)
    return result, out.getvalue()


COUNTED = """
asked = []

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    asked.append(name)
    return lambda *given, **named: 1.0
"""


def test_a_run_asks_for_each_part_of_the_users_own_once(tmp_path, monkeypatch):
    (tmp_path / "counted_parts.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = system(
        tmp_path,
        reward={"kind": "counted_parts:reward"},
        algorithm={"loss": "counted_parts:loss"},
        rollout={"tools": {"calc": "counted_parts:tool"}},
    )
    trainer = made.config.trainer.model_copy(update={"metrics": ["counted_parts:metric"]})
    made.config = made.config.model_copy(update={"trainer": trainer})
    made.folder.close()
    started(made, monkeypatch)
    trained(made, resume="latest")
    assert sorted(sys.modules["counted_parts"].asked) == ["loss", "metric", "reward", "tool"]
    assert made.reward.kind == "counted_parts:reward" and list(made.metrics) == ["counted_parts:metric"]


def test_resume_without_a_checkpoint_says_so_and_is_the_next_attempt(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.metrics({"step": 1, "attempt": 0})
    made.folder.close()
    started(made, monkeypatch)
    _, out = trained(made, resume="latest")
    assert "no whole checkpoint to resume from: starting anew, as attempt 1" in out
    lines = [json.loads(line) for line in made.folder.metrics_path.read_text().splitlines()]
    assert [(m["step"], m["attempt"]) for m in lines] == [(s, 1) for s in range(1, 13)]
    assert "no earlier run is there" not in out
    drop_after(made.folder.path, 4)
    trained(made, resume="latest")
    assert [(e["step"], e["attempt"]) for e in events(made) if e["event"] == "resume"] == [(0, 1), (4, 2)]
    assert latest(made.folder.path) == step_folder(made.folder.path, 12)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_no_thread_of_its_rewards(tmp_path, monkeypatch, fails):
    """A program may train more than once: each such thread would keep a run's reward, and a model in it."""
    threads = []

    class Rewarding(Scripted):
        async def one_step(self, step):
            def reward(trajectory):
                threads.append(threading.current_thread())

            self.sampler.calls.reward = reward
            await self.sampler.calls.of([SimpleNamespace(uid="u")])
            if fails:
                raise UserError("no more")
            return await super().one_step(step)

    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch, Rewarding)
    with pytest.raises(UserError, match="no more") if fails else nullcontext():
        trained(made, resume="latest")
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_resume_in_an_unused_folder_is_a_first_attempt(tmp_path, monkeypatch):
    made = system(tmp_path / "unused")
    made.folder.close()
    (made.folder.path / "config.yaml").unlink()
    started(made, monkeypatch)
    trained(made, resume="latest")
    assert [e for e in events(made) if e["event"] == "resume"] == []


def test_a_run_that_fails_before_its_first_step_leaves_a_summary(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch)

    def resolve(path):
        raise UserError("model.path m: no such folder")

    monkeypatch.setattr(runs.models, "resolve", resolve)
    with pytest.raises(UserError):
        trained(made)
    assert summary(made)["steps"] == 0 and summary(made)["exit"] == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_heard_while_the_model_is_made(tmp_path, monkeypatch, number, code):
    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch)

    def resolve(path):
        os.kill(os.getpid(), number)
        for _ in range(1000):
            pass
        raise AssertionError("goes on after the signal")

    monkeypatch.setattr(runs.models, "resolve", resolve)
    with pytest.raises(signals.Stopped) as caught:
        trained(made)
    assert caught.value.exit_code == code == summary(made)["exit"]
    time.sleep(2 * signals.REPEAT_SECONDS)
    heard = []
    with signals.listening(heard.append):
        os.kill(os.getpid(), number)
    assert heard == [number]


def test_a_report_that_fails_is_a_warning(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()

    class Spoilt(Scripted):
        async def run(self):
            result = await super().run()
            (self.system.folder.path / "events.jsonl").write_text('{"torn\n{"event": "x"}\n')
            return result

    started(made, monkeypatch, Spoilt)
    result, out = trained(made)
    assert result["exit"] == 0 and result["steps"] == 12
    assert "warning: no report was written" in out and "events.jsonl, line 1: not JSON" in out


def test_a_full_disk_ends_the_run_with_the_name_of_the_file(tmp_path, monkeypatch):
    """Not with what else fails because of it: a torn last line, a summary that is not written."""
    made = system(tmp_path)
    made.folder.close()

    def full(summary):
        raise OSError(errno.ENOSPC, "No space left on device", "summary.json")

    class Filling(Scripted):
        async def one_step(self, step):
            if step == 4:
                with open(self.system.folder.metrics_path, "a") as f:
                    f.write('{"step": 4, "x": "cut sh')
                log = self.system.folder.path / "events.jsonl"
                monkeypatch.setattr(self.system.folder, "summary", full)
                log.unlink()
                log.symlink_to("/dev/full")
                try:
                    self.system.folder.event("alarm")
                finally:
                    log.unlink()
            return await super().one_step(step)

    started(made, monkeypatch, Filling)
    out = io.StringIO()
    with pytest.raises(OSError, match="No space left on device") as caught:
        runs.train(made.config, console=Console(file=out, width=200))
    assert caught.value.filename == str(
        made.folder.path / "events.jsonl"
    )  # which the command line prints, with exit 3
    assert "warning: no summary was written: " in out.getvalue()


def test_resume_of_a_run_that_never_was_says_that_it_begins_anew(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    shutil.rmtree(made.folder.path)
    started(made, monkeypatch)
    _, out = trained(made, resume="latest")
    assert "--resume: no earlier run is there, so this one begins anew" in out
    assert "runs with a name like it" not in out


def test_resume_of_a_misspelt_run_names_the_one_that_was_meant(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    shutil.rmtree(made.folder.path)
    meant = made.folder.path.with_name(f"{made.folder.path.name}s")
    meant.mkdir()
    (meant / "metrics.jsonl").write_text('{"step": 39}\n{"step": 40}\n')
    (made.folder.path.parent / "other").mkdir()
    started(made, monkeypatch)
    _, out = trained(made, resume="latest")
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if "so this one begins anew" in line)
    assert lines[at - 1] == lines[at + 3] == "=" * 78
    assert lines[at + 1] == f"runs with a name like it: {meant} (step 40)"
    assert lines[at + 2].endswith(f"the same command with run.name={meant.name}")


def test_the_death_of_ray_is_told_at_once_while_the_loop_is_in_a_call_to_it(tmp_path, monkeypatch, capsys):
    left = []
    monkeypatch.setattr(runs, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(runs, "_leave_without_ray", lambda *given: left.append(capsys.readouterr().err))
    driver = SimpleNamespace(checkpointable=False, on_learner=SimpleNamespace(doing=None))
    loop = asyncio.new_event_loop()  # it never runs, as one that a call holds up
    lost = RayLost("Ray's raylet on this machine (pid 7) has died")
    runs._ray_has_died(lost, driver, SimpleNamespace(end_soon=None), loop)
    loop.close()
    (said,) = left
    assert said == f"unspiral: {lost}; the last whole step is saved where Ray lets the run live on\n"


def test_resume_of_a_path_that_is_not_there_is_refused_with_the_nearest_run(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch)
    meant = made.folder.path
    (meant / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=f"no such checkpoint folder; did you mean {meant}\\?"):
        trained(made, resume=str(meant.with_name(f"{meant.name}s")))


def test_a_folder_in_use_is_left_as_it_is(tmp_path, monkeypatch):
    made = system(tmp_path)  # holds it
    started(made, monkeypatch)
    with pytest.raises(UserError, match="in use"):
        trained(made)
    assert not (made.folder.path / "summary.json").exists()
