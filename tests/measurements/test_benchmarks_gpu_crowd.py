"""Several workers on one GPU against one: how work is dealt, what the rate of all together is, and a run."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import gpu_searcher
from benchmarks.gpu import crowd
from benchmarks.gpu.steady import Life, Window
from services.contracts import Question

QUESTIONS = [Question(str(i), f"who is {i}?", ("a",), "made") for i in range(10)]


def done(lives, window):
    lives = [Life(*life) for life in lives]
    return crowd.Done(lives, window, searches=len(lives), processor=0.25, engine=0.5)


def parsed(*given):
    parser = argparse.ArgumentParser()
    crowd.arguments(parser)
    return parser.parse_args(["--model", "m", "--data", "d", *given])


def test_questions_and_places_are_dealt_like_cards():
    shares = crowd.deal(QUESTIONS, 3, 7, "2-0", 0.5)
    assert [[q.id for q in s.questions] for s in shares] == [
        ["0", "3", "6", "9"],
        ["1", "4", "7"],
        ["2", "5", "8"],
    ]
    assert [(s.places, s.name, s.temperature) for s in shares] == [
        (3, "2-0-0", 0.5),
        (2, "2-0-1", 0.5),
        (2, "2-0-2", 0.5),
    ]


def test_the_steady_rate_counts_tokens_while_all_workers_are_full():
    first = done([(10.0, 11.0, 100), (11.0, 13.0, 200), (13.0, 17.0, 400)], Window(11.0, 15.0))
    second = done([(10.0, 12.0, 100), (12.0, 14.0, 300), (12.0, 18.0, 900)], Window(12.0, 14.0))
    row = crowd.numbers([first, second], began=10.0)
    assert (row["tokens"], row["seconds"], row["searches"]) == (2000, 8.0, 1.0)
    assert row["tokens_per_s"] == pytest.approx(2000 / 8)
    assert row["us_per_token"] == pytest.approx(250) and row["engine_us_per_token"] == pytest.approx(500)
    within = 200 / 2 + 400 / 4 + 300 + 900 * 2 / 6  # of 12 to 14, by the share of each life
    assert row["steady_tokens_per_s"] == pytest.approx(within / 2)
    for other in (done([(20.0, 30.0, 1)], Window(20.0, 25.0)), done([(20.0, 30.0, 1)], None)):
        assert "steady_tokens_per_s" not in crowd.numbers([first, other], began=10.0)


def test_a_trajectory_counts_by_the_share_of_its_life_within_the_window():
    """A long trajectory that ends in a short window wrote most of its tokens before it."""
    row = crowd.numbers([done([(0.0, 10.0, 1000), (9.8, 10.2, 4)], Window(9.9, 10.1))], began=0.0)
    assert row["steady_tokens_per_s"] == pytest.approx((1000 * 0.1 / 10 + 4 * 0.2 / 0.4) / 0.2)


def test_each_number_of_workers_has_a_row_and_a_ratio():
    def row(rate, **more):
        told = {"start_seconds": 9.0, "us_per_token": 12.0, "engine_us_per_token": 60.0, "busy": None}
        return told | {"tokens_per_s": rate} | more

    rounds = {"1 worker": [row(100.0), row(300.0)], "4 workers": [row(1.0, steady_tokens_per_s=500.0)]}
    assert crowd.ratios(rounds) == {"4 workers": 2.5}
    out = {"trajectories": 64, "in_flight": 16, "rounds": rounds, "ratio": crowd.ratios(rounds)}
    assert crowd.table(out).splitlines() == [
        "64 trajectories a round, 16 in flight on all workers",
        "1 worker  tokens/s 100, 300   (up in 9 s, 12.0 us of processor a token, 60.0 in the engines' "
        "processes)",
        "4 workers tokens/s 1, steady 500   (up in 9 s, 12.0 us of processor a token, 60.0 in the engines' "
        "processes)",
        "ratio 4 workers by 1 worker 2.50",
    ]


async def test_a_share_has_its_places_full_until_its_last_trajectory_begins():
    gone = subprocess.Popen([sys.executable, "-c", ""])  # as a compiler that the engine called
    gone.wait(60)

    class Worker:
        most = running = 0
        _engine = SimpleNamespace(reset_prefix_cache=lambda: asyncio.sleep(0))

        def engine_pids(self):
            return [gone.pid]

        async def rollout(self, request):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0)
            self.running -= 1
            action = SimpleNamespace(token_ids=[1, 2, 3], kind="search")
            return SimpleNamespace(actions=[action])

    worker = Worker()
    began = time.monotonic()
    said = await crowd.run_share(worker, crowd.Share("s", QUESTIONS, 2, 1.0))
    assert worker.most == 2 and said.searches == 10 and [life.tokens for life in said.lives] == [3] * 10
    starts = sorted(life.began for life in said.lives)
    assert began <= starts[0] and said.window == (starts[1], starts[-1]), "once two have begun"
    alone = await crowd.run_share(worker, crowd.Share("s", QUESTIONS[:2], 2, 1.0))
    assert alone.window is None, "nobody waited for a place"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--in-flight", "4", "--times", "9"], "need 36 questions, not 10"),
        (["--in-flight", "4", "--times", "1"], "--times must be 2 or more"),
        (["--in-flight", "2", "--times", "2", "--workers", "1", "3"], "at least the largest of --workers"),
    ],
)
def test_what_cannot_be_measured_is_said_first(monkeypatch, given, line):
    monkeypatch.setattr(crowd, "load_questions", lambda *_, **__: SimpleNamespace(rows=QUESTIONS))
    with pytest.raises(SystemExit, match=line):
        crowd.run(parsed(*given))


@pytest.mark.slow
def test_two_workers_in_processes_of_their_own_are_measured_together(tmp_path):
    texts = [f"cat{chr(97 + i % 26)} dog{chr(97 + i % 23)} bird{chr(97 + i % 19)}" for i in range(200)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "\n".join(json.dumps({"id": str(i), "contents": f"The {text} house"}) for i, text in enumerate(texts))
    )
    rows = [{"question": f"who is {text}?", "golden_answers": ["me"]} for text in texts[:40]]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    gpu_searcher.make_searcher("tiny", corpus, tmp_path / "m", thought=4, query=2, searches=1)
    args = parsed("--in-flight", "8", "--times", "3", "--repeats", "1", "--workers", "2")
    args.model, args.data, args.engine = str(tmp_path / "m"), tmp_path, "transformers"
    args.max_response_tokens, args.max_turns = 16, 1
    out = crowd.run(args)
    assert list(out["rounds"]) == ["2 workers"] and out["ratio"] == {}
    (row,) = out["rounds"]["2 workers"]
    assert row["tokens"] > 0 and row["tokens_per_s"] > 0 and row["us_per_token"] > 0
    assert "2 workers tokens/s " in crowd.table(out)
