"""The parts of the GPU benchmarks: the made-up searcher, what is seen from beside, and the comparison."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks import gpu_searcher, two_gpus
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import peer as gpu_peer
from benchmarks.gpu import rollout as gpu_rollout
from benchmarks.gpu import staleness as gpu_staleness
from benchmarks.gpu import steady as steady_load
from benchmarks.gpu import watch as gpu_watch
from benchmarks.gpu.sync import striking
from benchmarks.gpu.sync.turns import turn
from services.rollout.worker.tokenizer import load_tokenizer


def test_the_searcher_thinks_searches_and_answers_as_often_as_it_is_told(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"cat{chr(97 + i % 26)} dog{chr(97 + i % 23)} bird{chr(97 + i % 19)}" for i in range(400)]
    lines = [json.dumps({"contents": f"The {text} house"}) for text in texts]
    corpus.write_text("\n".join(lines), encoding="utf-8")
    folder = gpu_searcher.make_searcher("tiny", corpus, tmp_path / "m", thought=8, query=2, searches=3)
    tokenizer = load_tokenizer(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    id_of = tokenizer.convert_tokens_to_ids
    words = gpu_searcher.words_of(tokenizer)
    torch.manual_seed(0)
    context = torch.tensor([[*tokenizer.encode("who is"), words[0]]])
    for first, expected in (
        (words[0], {"<search>": 3 / 32, "<answer>": 1 / 32}),
        (words[1], {"</search>": 0.5}),
    ):
        context[0, -1] = first
        with torch.no_grad():
            p = model(context).logits[0, -1].softmax(-1)
        for tag, share in expected.items():
            assert abs(float(p[id_of(tag)]) - share) < 0.01 * share + 1e-3
        assert float(p[words].sum()) > 1 - sum(expected.values()) - 0.01
    # The layers are computed whole, and leave the class alone.
    assert all(layer.mlp.down_proj.weight[6:].abs().sum() > 0 for layer in model.model.layers)


def test_the_innermost_functions_of_a_profile_are_counted():
    stacks = "a (x.py:1);b (y.py:2) 6\na (x.py:1) 1\nc (z.py:3);b (y.py:2) 3\n"
    assert gpu_watch.top_functions(stacks) == [("b (y.py:2)", 0.9), ("a (x.py:1)", 0.1)]


def test_a_sample_of_the_engine_belongs_to_the_innermost_part():
    core, scheduler = "step (vllm/v1/engine/core.py:657)", "schedule (vllm/v1/core/sched/scheduler.py:800)"
    hashed = "get_computed_blocks (vllm/v1/core/kv_cache_manager.py:9);find (block_pool.py:3)"
    stacks = f"{core};{scheduler} 5\n{core};{scheduler};{hashed} 3\nsample (elsewhere.py:1) 2\n"
    assert gpu_watch.shares(stacks) == {"scheduler": 0.5, "prefix cache": 0.3, "other": 0.2}
    assert gpu_watch.shares("") == {}
    named = stacks.replace("schedule (", "Scheduler.schedule (").replace(
        "get_comp", "KVCacheManager.get_comp"
    )
    assert gpu_watch.shares(named) == gpu_watch.shares(stacks)


def test_the_parts_of_the_engine_are_functions_of_this_vllm():
    """Each part has a function that vLLM's or our files define under that name."""
    from importlib.util import find_spec

    folders = [Path(find_spec(name).submodule_search_locations[0]) for name in ("vllm", "services")]
    sources = {}
    for folder in (folders[0] / "v1", folders[1] / "rollout"):
        for file in folder.rglob("*.py"):
            sources[file.name] = sources.get(file.name, "") + file.read_text(encoding="utf-8")
    for function in itertools.chain(*gpu_watch.PARTS.values()):
        name, _, file = function.partition(" ")
        assert re.search(rf"def {name}\b", sources.get(file, "")), function


def test_the_busiest_process_is_looked_at():
    code = (
        "import sys, time\n"
        "while time.process_time() < float(sys.argv[1]): pass\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, seconds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for seconds in ("0", "0.5")
    ]
    try:
        for process in both:
            assert process.stdout.readline() == "done\n"
        assert gpu_watch.busiest([p.pid for p in both]) == both[1].pid
    finally:
        for process in both:
            process.communicate(timeout=30)
    assert gpu_watch.busiest([]) is None
    assert gpu_watch.seconds_of(both[1].pid) == 0.0  # it has ended


def test_an_engine_beside_the_first_has_a_name_and_arguments():
    assert gpu_rollout.beside('128={"max_num_seqs": 128}') == ("128", {"max_num_seqs": 128})
    for wrong in ("128", "={}", "a=[1]", "a={", "barrier={}", "a,b={}"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not of the form"):
            gpu_rollout.beside(wrong)
    row = {"tokens_per_s": 100.0, "turns": 2.0, "us_per_token": 9.0, "engine_us_per_token": 50.0}
    out = {
        "trajectories": 4,
        "start_seconds": 5.0,
        "beside": {"128": {}},
        "asynchronous": [row],
        "128": [row],
    }
    lines = gpu_rollout.table(out | {"engine_us_by_part": {"scheduler": 12.34}}).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["asynchronous", "128"]
    assert lines[3].split() == ["12.3", "us", "a", "token", "scheduler"]


async def test_further_arguments_reach_the_engine_of_that_worker_alone(monkeypatch):
    given, closed = [], []

    class Worker:
        def __init__(self, *args, **kwargs): ...

        async def start(self):
            given.append(gpu_rollout.vllm_engine._arguments("settings", "model", 0))

        async def close(self):
            closed.append(len(given))

    monkeypatch.setattr(gpu_rollout, "RolloutWorker", Worker)
    monkeypatch.setattr(gpu_rollout.vllm_engine, "_arguments", lambda *_: {"max_num_seqs": 256, "seed": 0})
    for more in ({"max_num_seqs": 128}, {}):
        async with gpu_rollout._started(None, "model", "url", more):
            pass
    assert given == [{"max_num_seqs": 128, "seed": 0}, {"max_num_seqs": 256, "seed": 0}] and closed == [1, 2]


def write(file, learner, rollout):
    rows = [{"tokens_per_s": rate, "us_per_token": 1e6 / rate, "turns": 2.0} for rate in rollout]
    file.write_text(
        json.dumps(
            {"devices": ["H"], "packed": {"tokens_per_s": learner, "peak_gib": 10.0}, "asynchronous": rows}
            | {"results": [{"what": "speed", "size": "3b", "ours": 0.1 * learner / 100, "ours_max": 9.0}]}
        )
    )
    return str(file)


def test_compare_names_what_became_worse_and_ends_with_its_status(tmp_path, monkeypatch, capsys):
    before = write(tmp_path / "a.json", 100.0, [900.0, 1000.0, 5000.0])
    after = write(tmp_path / "b.json", 50.0, [1000.0, 990.0, 1010.0])
    monkeypatch.setattr(sys, "argv", ["gpu", "compare", before, after])
    assert gpu.main() == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["packed/tokens_per_s", "100", "50", "-50.0%", "worse"]
    # Medians of repeats: 1000 before and after.
    assert ["asynchronous/tokens_per_s", "1000", "1000", "+0.0%"] in [line[:4] for line in lines]
    assert ["results[what=speed", "size=3b]/ours", "0.1", "0.05", "+50.0%", "better"] in lines
    assert lines[-1][:3] == ["1", "of", "5"]
    monkeypatch.setattr(sys, "argv", ["gpu", "compare", before, before])
    assert gpu.main() == 0
    (tmp_path / "c.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["gpu", "compare", before, str(tmp_path / "c.json")])
    assert gpu.main() == 2


def test_staleness_is_compared_by_reward_over_wall_time(tmp_path):
    for staleness, seconds in ((0, 6.0), (1, 3.0)):
        folder = tmp_path / f"staleness_{staleness}"
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"em_before": 0.1, "em_after": 0.2 + staleness / 10}))
        steps = [
            {
                "time/step": seconds,
                "reward/mean": n / 100,
                "mismatch/abs_logp": 0.01,
                "rollout/stale_dropped": 1,
            }
            for n in range(int(60 / seconds))
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    out = {"minutes": 1.0} | {
        f"staleness_{n}": gpu_staleness.report(tmp_path / f"staleness_{n}", 1.0) for n in (0, 1)
    }
    behind, ahead = out["staleness_0"], out["staleness_1"]
    assert (behind["steps"], ahead["steps"], ahead["stale_dropped"]) == (10, 20, 20)
    # A step that ends at 6 s is in the second tenth, with two steps of the other run.
    assert behind["reward_by_tenth"][:3] == [None, 0.0, 0.01]
    assert ahead["reward_by_tenth"][:3] == [0.0, 0.015, 0.035]
    lines = gpu_staleness.table(out).splitlines()
    assert lines[2].split()[:7] == ["0", "10", "6.00", "(6.00", "to", "6.00)", "0.100"]
    assert lines[3].split()[6:10] == ["0.100", "0.300", "0.0100", "20"]


def test_the_learners_distance_to_itself_is_that_of_its_rounding(tmp_path):
    from learner_world import make_config, make_policy

    from benchmarks.gpu.sync.actors import BenchRank
    from benchmarks.gpu.sync.batches import random_batch

    model = make_policy(tmp_path)
    batch = random_batch(4, 16, 40, seed=1)
    distance = {}
    for dtype in ("float32", "bfloat16"):
        config = make_config(model, learner={"dtype": dtype, "zero_stage": 1})
        rank = BenchRank(config, model_path=str(model), reference=False, rank=0)
        rank.setup("127.0.0.1", rank.host_store("127.0.0.1"))
        distance[dtype] = rank.rounding(batch)
    assert distance["float32"] < 1e-6 and 1e-4 < distance["bfloat16"] < 0.1


def test_what_the_time_does_not_suffice_for_is_left_out_and_a_failure_leaves_the_others_alone(
    tmp_path, monkeypatch, capsys
):
    table = "print('noise'); print('speed: ours | bare'); print('  1 | 2')"
    made = [
        two_gpus.Part("good", ["-c", table], 60),
        two_gpus.Part("failing", ["-c", "raise SystemExit('no such card')"], 60),
        two_gpus.Part("long", ["-c", ""], 6000),
        two_gpus.Part("last", ["-c", table], 60),
    ]
    monkeypatch.setattr(two_gpus, "parts", lambda _: made)
    monkeypatch.setattr(sys, "argv", ["two_gpus", "--out", str(tmp_path), "--minutes", "10"])
    assert two_gpus.main() == 1
    said = capsys.readouterr().out
    ended = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines()[-4:]}
    assert list(ended) == ["good", "failing", "long", "last"]
    assert ended["good"].startswith("status 0") and ended["last"].startswith("status 0")
    assert ended["failing"].startswith("status 1") and ended["long"] == "left out: too little time"
    assert said.count("speed: ours | bare\n  1 | 2") == 2 and "noise" not in said and "no such card" in said


def test_a_measurement_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(two_gpus, "END_SECONDS", 0.0)
    part = two_gpus.Part("hangs", ["-c", "import time; time.sleep(600)"], 0.5)
    assert two_gpus.carry_out(part, tmp_path / "log").startswith("ended by its limit")


def test_the_plan_for_two_gpus_has_every_size(tmp_path):
    args = argparse.Namespace(cpu=False, model="m", data=tmp_path, only=None, out=tmp_path)
    plan = two_gpus.parts(args)
    names = [part.name for part in plan]
    assert names[:4] == ["sync_0.5b", "sync_1.5b", "sync_3b", "sync_7b"] and names[-1] == "staleness"
    args.only = ["loss"]
    [loss] = two_gpus.chosen(args)
    assert loss.command[:3] == ["-m", "benchmarks.gpu_sync", "loss"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--only", "sync_3"], "--only sync_3: accepted are sync_0.5b, sync_1.5b, sync_3b, sync_7b, loss, "),
        (["--only", "loss", "nothing"], "--only nothing: accepted are sync_0.5b,"),
        (["--only", "staleness"], "(staleness needs --model and --data)"),
    ],
)
def test_a_part_that_is_none_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys, more, says):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["two_gpus", "--out", str(out), *more])
    assert two_gpus.main() == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert says in line and said.out == "" and not out.exists()


class Syncs:
    """Syncs that stand still until they are struck, or end by themselves at once."""

    def __init__(self, ends_first):
        self.ends_first = ends_first
        self.under_way = False
        self.blows = 0
        self.struck = asyncio.Event()

    async def sync(self):
        self.under_way = True
        if not self.ends_first:
            await self.struck.wait()

    def strike(self):
        self.blows += 1
        self.struck.set()


def test_a_blow_falls_within_a_sync_or_not_at_all():
    async def blow(ends_first):
        syncs = Syncs(ends_first)
        seconds = await striking.struck(syncs.sync, lambda: syncs.under_way, syncs.strike, 0.01)
        return seconds, syncs.blows

    seconds, blows = asyncio.run(blow(False))
    assert seconds is not None and blows == 1
    assert asyncio.run(blow(True)) == (None, 0)


def test_a_loss_counts_only_where_a_sync_was_broken():
    """The pool's own word decides: a worker that had the whole version is lost without `sync_failed`."""
    lost = {"event": "worker_lost", "worker": "w1"}
    other = {"event": "sync_failed", "worker": "w0", "version": 2}
    assert not striking.failed([lost, other], "w1") and striking.failed([lost, other], "w0")

    def tries(breaks_at):
        said, shares = [], []

        async def strike(share):
            shares.append(share)
            return striking.Blow("w1", broke=len(shares) == breaks_at, seconds=2.0)

        return asyncio.run(striking.until_broken(strike, said.append)), shares, said

    blow, shares, said = tries(3)
    assert blow.seconds == 2.0 and shares == list(striking.SHARES[:3]) and len(said) == 2
    assert said[0] == "nothing was broken: w1 had the weights before the blow at 0.3 of a sync"
    blow, shares, said = tries(None)
    assert blow is None and shares == list(striking.SHARES) == sorted(shares, reverse=True)


async def test_the_steady_rate_counts_tokens_while_all_places_are_taken(monkeypatch):
    """Trajectories end in the order in which they began, each as the clock ticks once."""
    clock = SimpleNamespace(now=100.0, done=[])
    monkeypatch.setattr(steady_load, "time", SimpleNamespace(monotonic=lambda: clock.now))
    turn = asyncio.Condition()

    class Worker:
        async def rollout(self, request):
            async with turn:
                await turn.wait_for(lambda: len(clock.done) == request)
                for _ in range(20):  # what the one before has set free begins meanwhile
                    await asyncio.sleep(0)
                clock.now += 1.0
                clock.done.append(request)
                turn.notify_all()
            return SimpleNamespace(actions=[SimpleNamespace(token_ids=[0] * (10 + request))])

    steady = steady_load.Steady(12, 3)
    done = await asyncio.wait_for(steady.run(Worker(), list(range(12))), 30)
    assert len(done) == 12
    # The last, the twelfth, begins when the ninth has ended, after nine ticks. The tenth has had two of its
    # three by then, and the eleventh one.
    within = sum(10 + i for i in range(9)) + 19 * 2 / 3 + 20 / 3
    assert steady.numbers()["steady_tokens_per_s"] == pytest.approx(within / 9)
    all_at_once = steady_load.Steady(3, 3)
    clock.done.clear()
    await asyncio.wait_for(all_at_once.run(Worker(), list(range(3))), 30)
    assert all_at_once.numbers() == {}
    assert steady_load.Steady(12, 3).numbers() == {}, "one batch after the other, and no places"


def test_the_rollouts_of_several_sizes_have_a_row_and_a_ratio_each():
    row = {"tokens_per_s": 100.0, "turns": 2.0, "steady_tokens_per_s": 300.0, "busy": 0.5, "steady_busy": 0.9}
    out = {
        "trajectories": 64,
        "start_seconds": 5.0,
        "asynchronous, 8 in flight": [row],
        "barrier, 8 in flight": [row | {"steady_tokens_per_s": None}],
        "vLLM's own front end, 8 in flight": [row],
        "ratio, 8 in flight": 3.0,
        "top": [("f (a.py:1)", 0.5)],
        "top_of_engine": [],
    }
    text = gpu_rollout.table(out)
    assert "steady 300, busy 90% then" in text and "  50.0% f (a.py:1)" in text
    assert text.count("in flight") == 4 and "ratio, 8 in flight 3.00" in text
    assert gpu_rollout.rate_of(row) == 300.0 and gpu_rollout.rate_of({"tokens_per_s": 100.0}) == 100.0


def test_a_coin_pays_half_of_all_answers_the_same_on_both_sides():
    texts = [f"<think> n{i} </think> <answer> {i} </answer>" for i in range(2000)]
    paid = [gpu_peer.coin(text) for text in texts]
    assert 0.45 < sum(paid) / len(paid) < 0.55 and set(paid) == {0.0, 1.0}
    trajectory = SimpleNamespace(actions=[SimpleNamespace(text="no"), SimpleNamespace(text=f"{texts[7]}\n")])
    assert gpu_peer.coin_reward(trajectory) == paid[7]


def test_what_the_time_left_out_has_neither_a_row_nor_a_ratio():
    row = {"tokens_per_s": 100.0}
    runs = {
        "asynchronous, 8 in flight": [row, row],
        "barrier, 8 in flight": [{"tokens_per_s": 50.0}],
        "asynchronous, 16 in flight": [row],
        "barrier, 16 in flight": [],
    }
    out = gpu_rollout.compared(runs, [8, 16])
    assert out.pop("ratio, 8 in flight") == 2.0
    assert out == {name: rows for name, rows in runs.items() if rows}
    assert set(gpu_rollout.compared({"asynchronous": [row], "barrier": [row]}, [None])) == {
        "asynchronous",
        "barrier",
        "ratio",
    }


async def test_measurements_that_start_beside_each_other_are_timed_in_turns(tmp_path):
    """The other is a process that ends without giving its turn back."""
    file = tmp_path / "new" / "turn"
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from benchmarks.gpu.sync.turns import turn\n"
        "async def hold():\n"
        "    async with turn(Path(sys.argv[1])):\n"
        "        print('in', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(hold())\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                async with turn(file):
                    pass
    finally:
        other.kill()
        other.wait()
    async with asyncio.timeout(30), turn(file):
        async with turn(tmp_path / "another"), turn(None):
            pass
