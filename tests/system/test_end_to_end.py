"""The whole system from the command line: real Ray, vLLM, DeepSpeed, retriever and store."""

import json
import os
import signal
import sqlite3

import pytest
from end_to_end import command, configuration, events, finish, metrics, reproducible
from runs import kill, until

from services.likelihood.store.opening import open_store

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(files, folder):
    """One whole run; its folder."""
    code, out = finish(command("train", "--config", configuration(files, folder, "whole")))
    assert code == 0, out
    return folder / "whole"


def test_a_run_leaves_what_the_docs_promise(undisturbed):
    steps = metrics(undisturbed)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    for name in (
        "config.yaml",
        "events.jsonl",
        "likelihood.db",
        "summary.json",
        "report.html",
        "trajectories/step_000001.jsonl",
    ):
        assert (undisturbed / name).is_file(), name
    assert [p.name for p in sorted((undisturbed / "checkpoints").iterdir())] == ["step_000004", "step_000006"]
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["exit"] == 0
    promised = [
        "step",
        "reward/mean",
        "reward/em",
        "displacement/mean",
        "displacement/share_negative",
        "leak/logp_entropy",
        "entropy",
        "grad_norm",
        "ratio/max",
        "policy/clip_fraction",
        "kl/sampler",
        "mismatch/abs_logp",
        "llds/loss",
        "llds/active_tokens",
        "llds/active_actions",
        "groups/zero_variance",
        "rollout/tokens_per_s",
        "rollout/length",
        "rollout/searches",
        "rollout/valid",
        "time/rollout",
        "time/reward",
        "time/logprob",
        "time/update",
        "time/sync",
        "time/step",
        "phase",
    ]
    assert [k for k in promised if k not in steps[0]] == []
    assert all(any(k in s for s in steps) for k in ("logp/right", "logp/wrong", "logp/right_action_0"))
    assert "probe/lag" in steps[3]
    assert "probe/fixed" in steps[5]


def test_the_tokens_of_the_microscope_sum_to_the_curve_and_are_the_trajectories_words(undisturbed):
    store = open_store(str(undisturbed / "likelihood.db"))
    kept = {
        step: sum(not t.probe for t in store.samples("whole", step)) for step in store.sampled_steps("whole")
    }
    assert kept == {step: 12 for step in range(1, 7)}
    for line in metrics(undisturbed):
        if line.get("displacement/mean") is None:  # the weights did not move
            continue
        found = [t for t in store.samples("whole", line["step"]) if not t.probe]
        pairs = [
            (after, before)
            for t in found
            if t.advantage >= 0
            for w in t.written
            for after, before in zip(w.logp_after, w.logp_before, strict=True)
        ]
        mean = sum(after - before for after, before in pairs) / len(pairs)
        assert abs(mean - line["displacement/mean"]) < 1e-4, line["step"]
    words = (undisturbed / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    said = {t["uid"]: [s["text"] for s in t["segments"]] for t in map(json.loads, words)}
    for t in store.samples("whole", 1):
        for segment, text in zip(t.segments, said[t.uid], strict=True):
            assert segment.by == "environment" or "".join(segment.tokens).startswith(text)
        assert t.scoring.golden and all(w.seconds > 0 for w in t.written)
    store.close()
    assert '"samples":[{"step":1,"why":"first"' in (undisturbed / "report.html").read_text()


def test_sampler_and_learner_agree_at_every_step(undisturbed):
    """After each sync the sampler's log-probs are the learner's: a stale weight or cache would show here."""
    for step in metrics(undisturbed):
        assert step["mismatch/abs_logp"] < 1e-4
        assert step["grad_norm"] > 0


def test_llds_acts_after_the_first_optimiser_step_alone(undisturbed):
    steps = metrics(undisturbed)
    assert all(s["llds/active_tokens_step_0"] == 0 for s in steps)
    assert sum(s["llds/active_tokens"] for s in steps) > 0


def test_the_store_holds_each_trajectory_once(undisturbed):
    with sqlite3.connect(undisturbed / "likelihood.db") as db:
        uids = [r[0] for r in db.execute("select uid from trajectory")]
    written = [
        json.loads(line)["uid"]
        for f in sorted(undisturbed.glob("trajectories/*.jsonl"))
        for line in f.read_text().splitlines()
    ]
    assert len(uids) == len(set(uids)) == 6 * 12
    assert sorted(uids) == sorted(written)


def test_a_run_goes_on_after_kill_9_and_after_sigterm_with_the_metrics_of_an_undisturbed_one(
    files, folder, undisturbed
):
    """Same seed, same run: the steps before the kill, and those after the resume, are the undisturbed run's
    to the last bit. SIGTERM ends a run after its step, with a checkpoint."""
    config, run = configuration(files, folder, "killed"), folder / "killed"
    process = command("train", "--config", config)
    until(lambda: len(metrics(run)) >= 3, process, 200)
    kill(process)
    before, whole = metrics(run), metrics(undisturbed)
    assert [reproducible(s) for s in before] == [reproducible(s) for s in whole[: len(before)]]
    kept = {p.name for p in (run / "checkpoints").glob("step_*")}

    resume = ("train", "--config", config, "--resume", "latest")
    process = command(*resume, "trainer.steps=500", "trainer.checkpoint_every=0", start_new_session=True)
    until(lambda: len(metrics(run)) >= 6, process, 200)
    # As `timeout` does. Ray, which the end of a run needs, must not hear it.
    os.killpg(process.pid, signal.SIGTERM)
    code, out = finish(process, 120)
    assert code == 143, out
    assert "Traceback" not in out
    assert json.loads((run / "summary.json").read_text())["exit"] == 143
    after = metrics(run)
    done = [s["step"] for s in after]
    assert done == list(range(1, len(done) + 1))
    assert [reproducible(s) for s in after[:6]] == [reproducible(s) for s in whole]
    assert after[-1]["attempt"] == 1
    assert after[0]["attempt"] == 0
    assert len(events(run, "resume")) == 1
    assert {p.name for p in (run / "checkpoints").glob("step_*")} - kept == {f"step_{done[-1]:06d}"}

    last = done[-1] + 2
    code, out = finish(command(*resume, f"trainer.steps={last}"))
    assert code == 0, out
    assert [s["step"] for s in metrics(run)] == list(range(1, last + 1))
    assert [s["attempt"] for s in metrics(run)] == [s["attempt"] for s in after] + [2] * 2


def test_a_retriever_that_is_down_at_the_start_ends_the_run_before_ray_with_status_3(files, folder):
    retriever = {"corpus": None, "url": "http://127.0.0.1:9", "start_timeout_seconds": 2}
    code, out = finish(
        command("train", "--config", configuration(files, folder, "down", retriever=retriever)), 120
    )
    assert code == 3, out
    assert "starting a local Ray" not in out
    assert out.strip().splitlines()[-1] == (
        "unspiral: retriever.url: nothing listens at http://127.0.0.1:9, tried for 2 s (Connection refused); "
        "expected a running retriever there, such as `unspiral serve retriever INDEX --port 9`; or give "
        "retriever.index or .corpus, and the run starts one itself"
    )
    assert "Traceback" not in out
