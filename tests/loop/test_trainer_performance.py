"""The table at the end of a run: exact numbers from made-up metrics."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from trainer.learner.results import RankInfo
from trainer.loop.run.performance import of_run, performance, rendered

STEP = {
    "time/step": 10.0,
    "time/rollout": 5.0,
    "time/rollout_wait": 5.0,
    "time/update": 3.0,
    "time/update_compute": 2.75,
    "time/logprob": 1.0,
    "time/sync": 0.75,
    "rollout/tokens_per_s": 2000.0,
    "learner/tokens": 30_000.0,
    "learner/scored_tokens": 30_000.0,
    "learner/action_tokens": 6_000.0,
    "learner/scored_action_tokens": 5_000.0,
    "sync/bytes": 1e9,
}
SLOW_START = STEP | {"time/step": 100.0, "time/update": 90.0}
RANK = RankInfo(
    pid=1,
    host="a",
    device="cuda:0",
    device_name="NVIDIA H100 80GB HBM3",
    device_uuid="GPU-1",
    dtype="bfloat16",
    lora=False,
    parameters=10**9,
    head_parameters=10**8,
)


def test_shares_rates_and_overhead_are_exact_and_the_first_step_is_left_out():
    slower = STEP | {
        "time/step": 30.0,
        "time/rollout": 20.0,
        "time/rollout_wait": 20.0,
        "time/update": 8.0,
        "time/sync": 0.25,
    }
    numbers = performance([SLOW_START, STEP, slower], [RANK, RANK])
    assert numbers["steps"] == 2 and numbers["seconds_per_step"] == 20.0
    shares = {
        name: round(numbers[f"share/{name}"], 6) for name in ("rollout", "update", "logprob", "sync", "other")
    }
    assert shares == {"rollout": 0.625, "update": 0.275, "logprob": 0.05, "sync": 0.025, "other": 0.025}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert numbers["overhead"] == pytest.approx((1.0 + 11.0 - 5.5) / 40)
    assert numbers["rollout/tokens_per_s"] == 2000.0
    assert numbers["learner/tokens_per_s"] == pytest.approx(60_000 / 11)
    rate = (1e9 * 8 * 60_000 + 1e8 * (6 * 12_000 + 2 * 10_000)) / 11
    assert numbers["learner/flops_per_s"] == pytest.approx(rate)
    assert numbers["learner/mfu"] == pytest.approx(rate / (2 * 989e12))
    assert numbers["sync/bytes"] == 1e9 and numbers["sync/seconds"] == 0.5


def test_rollouts_beside_the_update_count_as_the_time_waited_for_them():
    numbers = performance([STEP | {"time/rollout": 9.0, "time/rollout_wait": 4.0, "time/update": 4.0}])
    assert numbers["share/rollout"] == 0.4 and numbers["share/other"] == pytest.approx(0.025)


def test_lora_counts_fewer_operations_and_an_unknown_device_has_no_utilisation():
    numbers = performance([STEP], [replace(RANK, lora=True, device_name="Somebody's card")])
    assert numbers["learner/flops_per_s"] == pytest.approx(
        (1e9 * 6 * 30_000 + 1e8 * (4 * 6_000 + 2 * 5_000)) / 3
    )
    assert "learner/mfu" not in numbers
    assert "learner/mfu" not in performance([STEP], [replace(RANK, dtype="float32")])


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H20", None),
    ],
)
def test_utilisation_is_of_the_device_itself_and_not_of_one_whose_name_begins_alike(device, peak):
    numbers = performance([STEP], [replace(RANK, device_name=device)])
    assert numbers.get("learner/mfu") == (numbers["learner/flops_per_s"] / peak if peak else None)


def test_a_run_without_steps_has_no_performance(tmp_path):
    assert performance([]) == {} and of_run(tmp_path / "metrics.jsonl") == {}


def test_a_line_that_a_full_disk_has_torn_is_left_out(tmp_path):
    whole = json.dumps(STEP) + "\n"
    (tmp_path / "metrics.jsonl").write_text(whole + whole + whole[:40])
    assert of_run(tmp_path / "metrics.jsonl") == performance([STEP, STEP])


def test_the_table_shows_what_is_known(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(m) + "\n" for m in [SLOW_START, STEP | {"learner/tokens": None}])
    )
    text = io.StringIO()
    Console(file=text, width=80).print(rendered(of_run(tmp_path / "metrics.jsonl")))
    lines = [line.rsplit(maxsplit=1) for line in text.getvalue().splitlines()[1:]]
    assert {what.strip(): figure for what, figure in lines} == {
        "seconds per step": "10.00",
        "rollout": "50.0%",
        "update": "30.0%",
        "logprob": "10.0%",
        "sync": "7.5%",
        "other": "2.5%",
        "Ray, services, driver": "5.0%",
        "rollout tokens/s": "2,000",
        "learner tokens/s": "0",
        "bytes a sync": "1,000,000,000",
        "seconds a sync": "0.750",
    }
