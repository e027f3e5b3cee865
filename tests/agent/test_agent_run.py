"""A small real run, and the commands that look into it and talk to what it has trained: real Ray, vLLM and
DeepSpeed."""

from __future__ import annotations

import json

import pytest
from end_to_end import command, configuration, events, finish, metrics
from test_trace import check_events

from trainer.loop.run.spans import read_spans

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(files, folder):
    """A run of two steps, scored greedily at its end; its folder."""
    config = configuration(
        files,
        folder,
        "asked",
        trainer={"steps": 2, "eval_at_ends": True},
        rollout={"deterministic": False},
    )
    code, out = finish(command("train", "--config", config))
    assert code == 0, out
    return folder / "asked"


def test_the_spans_of_each_step_add_up(trained, folder):
    for step in metrics(trained):
        spans = read_spans(trained, step["step"])
        whole = spans.ended - spans.began
        assert whole >= step["time/step"]
        parts = {s.name: s for s in spans.driver if s.began >= spans.began}
        for name, key in (("wait for rollouts", "rollout_wait"), ("update", "update"), ("sync", "sync")):
            assert parts[name].seconds == pytest.approx(step[f"time/{key}"], abs=0.05)
        top = ("wait for rollouts", "advantages", "update", "sync", "score", "record")
        assert sum(parts[name].seconds for name in top) == pytest.approx(whole, rel=0.05, abs=0.05)
        assert len(spans.trajectories) == 12
        wait = parts["wait for rollouts"]
        for t in spans.trajectories:
            first, *inner = t.spans
            assert t.asked <= first.began and first.began + first.seconds <= t.received + 1e-6
            assert wait.began - 0.01 <= first.began and t.received <= wait.began + wait.seconds + 0.01
            assert inner[0].name == "generate" and sum(s.seconds for s in inner) <= first.seconds + 1e-5
    code, out = finish(command("trace", trained, 2, "-o", folder / "t.json"))
    assert code == 0 and "12 trajectories on 1 worker" in out, out
    trace = json.loads((folder / "t.json").read_text())
    complete = check_events(trace)
    assert set(trace["otherData"]["clocks"].values()) == {"as the driver's"}
    assert {"driver", "trajectory", "rollout"} <= {e["cat"] for e in complete}


def test_a_question_gives_the_tokens_of_the_greedy_evaluation_in_training(trained):
    """With the run's own template, turns and lengths, and the retriever of the evaluation. In the laboratory
    a word is a token."""
    (score,) = (e for e in events(trained, "evaluation") if e["tag"] == "after")
    assert score["overall"]["n"] == 8
    file = trained / "trajectories" / "eval_after_greedy.jsonl"
    evaluated = [json.loads(line) for line in file.read_text().splitlines()]
    asking = command(
        "ask",
        *("--checkpoint", trained, "--retriever", trained / "eval_retriever_index", "--json"),
        stdin=-1,
    )
    asking.stdin.write("".join(f"{t['question']}\n" for t in evaluated))
    code, out = finish(asking)
    assert code == 0, out
    asked = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [t["question"] for t in asked] == [t["question"] for t in evaluated]
    for ours, theirs in zip(asked, evaluated, strict=True):
        assert [(s["by"], s["text"]) for s in ours["segments"]] == [
            (s["by"], s["text"]) for s in theirs["segments"]
        ]
        assert all(
            len(s["token_ids"]) == len(s["text"].split()) == len(s["logprobs"])
            for s in ours["segments"]
            if s["by"] == "model" and "<eos>" not in s["text"] and "<pad>" not in s["text"]
        )
        assert ours["finish"] == theirs["finish"]
