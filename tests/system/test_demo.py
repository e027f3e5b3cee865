"""The demo learns, and what it learns is to search."""

import json
import re

import pytest
from end_to_end import command, finish, metrics
from page_commands import as_typed, blocks
from places import ROOT

from services.likelihood.store.opening import open_store

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """`unspiral demo`, once; the runs' folder and what was printed."""
    folder = tmp_path_factory.mktemp("demo")
    code, out = finish(command("demo", "--dir", folder), 800)
    assert code == 0, out
    return folder, out


def test_held_out_exact_match_rises(demo):
    folder, out = demo
    summary = json.loads((folder / "demo-0" / "summary.json").read_text())
    # The same weights scored .165 to .23 before: 200 sampled answers have a standard error of .03.
    assert summary["em_after_sampled"] - summary["em_before_sampled"] >= 0.15
    assert summary["em_after"] - summary["em_before"] >= 0.2
    assert summary["phase"] == "healthy"
    for label, suffix in (("sampled, T = 1", "_sampled"), ("greedy", "")):
        assert re.search(
            rf"{label}\s+{summary[f'em_before{suffix}']:.3f}\s+{summary[f'em_after{suffix}']:.3f}", out
        ), out
    asked = re.search(r"one question: (.+?)  \(answer: (.+)\)\n  before:\n", out)
    assert asked and re.search(r"-> wrong, \d searches\n  after:\n", out) and "-> right, " in out
    assert re.search(r"\nnext:\n(  unspiral .+\n){4}", out)
    report = re.search(r"report: (\S+)", out.splitlines()[-1])
    assert report and (folder / "demo-0" / "report.html").samefile(report[1])


def test_the_policy_learns_to_search_and_sampler_and_learner_agree_throughout(demo):
    steps = metrics(demo[0] / "demo-0")
    assert steps[-1]["rollout/searches"] > steps[0]["rollout/searches"]
    assert max(s["mismatch/abs_logp"] for s in steps) < 1e-4
    leaks = [
        s["leak/logp_entropy"] for s in steps
    ]  # noise of sampling, which one step may have and not three
    assert max(map(min, zip(leaks, leaks[1:], leaks[2:], strict=False))) < 0.1


def test_the_microscope_keeps_the_documents_of_each_search(demo):
    folder = demo[0] / "demo-0"
    store = open_store(str(folder / "likelihood.db"))
    last = max(store.sampled_steps("demo-0"))
    kept = [t for t in store.samples("demo-0", last) if not t.probe]
    store.close()
    lines = (folder / "trajectories" / f"step_{last:06d}.jsonl").read_text().splitlines()
    written = {t["uid"]: t["segments"] for t in map(json.loads, lines)}
    searches = [
        (segment, of_run)
        for t in kept
        for segment, of_run in zip(t.segments, written[t.uid], strict=True)
        if of_run.get("kind") == "search"
    ]
    answered = [(segment, of_run) for segment, of_run in searches if of_run["documents"] is not None]
    assert answered
    for segment, of_run in answered:
        assert [d.id for d in segment.documents] == of_run["documents"]
        assert all(d.title and d.text for d in segment.documents)
    for segment, of_run in searches:  # a search in the last turn is not answered
        assert (segment.documents is None) == (of_run["documents"] is None)


@pytest.mark.parametrize("page", ["README.md", "docs/ask.md"])
def test_the_commands_of_a_page_about_a_trained_run_work_on_the_demos(demo, tmp_path, page):
    """A service that runs until it is stopped has tests of its own."""
    folder, _ = demo
    (tmp_path / "runs").symlink_to(folder)
    (tmp_path / "questions.txt").write_text("what is the hall of the guild of n26 n6 ?\n")
    shown = [block for block in blocks(ROOT / page) if block.why == "a trained run"]
    assert shown
    for block in shown:
        done = as_typed(block.text, tmp_path, timeout=400)
        assert done.returncode == 0, f"{page}, line {block.line}: {done.stdout}{done.stderr}"


def test_with_documents_shuffled_between_queries_the_gain_is_gone(demo):
    """Each title keeps its place, and gets the facts of another document: a policy that knew answers would
    keep its score."""
    folder, _ = demo
    rows = [
        json.loads(line) for line in (folder / "lab" / "world_1000000_corpus.jsonl").read_text().splitlines()
    ]
    titles, bodies = zip(*(r["contents"].split("\n", 1) for r in rows), strict=True)
    for kind in (
        "town",
        "guild",
        "person",
    ):  # facts of the same kind change places, so that the form stays what it was
        word = {"town": "river", "guild": "colour", "person": "born"}[kind]
        mine = [i for i, b in enumerate(bodies) if word in b.split()]
        for i, j in zip(mine, mine[1:] + mine[:1], strict=True):
            rows[i]["contents"] = f"{titles[i]}\n{bodies[j]}"
    shuffled = folder / "shuffled.jsonl"
    shuffled.write_text("".join(json.dumps(r) + "\n" for r in rows))
    out_file = folder / "scores.json"
    code, out = finish(
        command(
            "eval",
            "--config",
            folder / "demo-0" / "config.yaml",
            "--checkpoint",
            sorted((folder / "demo-0" / "checkpoints").iterdir())[-1],
            "--out",
            out_file,
            "--limit",
            60,
            f"evaluation.retriever.corpus={shuffled}",
            "run.name=shuffled",
        ),
        300,
    )
    assert code == 0, out
    scores = json.loads(out_file.read_text())
    assert scores["overall"]["em"] < 0.1
    # An evaluation of a checkpoint scores every row, up to the limit.
    assert scores["overall"]["n"] == 60
    assert sum(s["n"] for s in scores["sources"].values()) == 60
