"""A configuration for GPUs on a machine without them is refused before Ray starts."""

import pytest
from command_line import run  # noqa: F401

from trainer.config.schema import parse_config
from trainer.session.gpus import check_gpus_here, gpus_here, lack_of_gpus

NEEDED = {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://none"}}
SHARED = {"share_gpus": True, "workers": 1, "max_staleness": 0}


@pytest.mark.parametrize(
    ("rollout", "learner", "there", "lack"),
    [
        ({}, {}, 0, None),  # a run on the CPU
        ({"workers": 4}, {"ranks": 2}, 0, None),
        (SHARED, {}, 1, None),
        (SHARED | {"engine": "transformers"}, {}, 0, None),
        (SHARED, {}, 0, "rollout.share_gpus=true: needs 1 GPU, and this machine has none"),
        (
            {"tensor_parallel": 2, "workers": 3},
            {"ranks": 2},
            0,
            "rollout.tensor_parallel=2: needs 8 GPUs, and this machine has none",
        ),
        ({"tensor_parallel": 2, "workers": 3}, {"ranks": 2}, 8, None),
        ({"workers": "all"}, {"ranks": 4}, 5, None),
        (
            {"workers": "all"},
            {"ranks": 4},
            4,
            "learner.ranks=4, rollout.workers=all: 5 GPUs are needed, and this machine has 4",
        ),
        (SHARED | {"workers": 3}, {"ranks": 2}, 2, "3 GPUs are needed, and this machine has 2"),
    ],
)
def test_the_gpus_that_a_run_needs_are_counted(rollout, learner, there, lack):
    found = lack_of_gpus(parse_config({**NEEDED, "rollout": rollout, "learner": learner}), there)
    if lack is None:
        assert found is None
    else:
        assert found is not None and found[0].endswith(lack)


def test_train_on_a_machine_without_a_gpu_ends_before_anything_starts(run, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("trainer.session.gpus.gpus_here", lambda: 0)
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "who?", "golden_answers": ["me"]}\n')
    config = tmp_path / "c.yaml"
    config.write_text(
        f"run: {{name: r, dir: {tmp_path}/runs}}\nmodel: {{path: 'lab:0'}}\ndata: {{train: {data}}}\n"
        "retriever: {url: 'http://127.0.0.1:1'}\n"
        "rollout: {share_gpus: true, workers: 1, max_staleness: 0}\n"
    )
    status, out, err = run("train", "--config", str(config))
    assert (status, out) == (3, "")
    assert err == (
        "unspiral: rollout.share_gpus=true: needs 1 GPU, and this machine has none; "
        "unspiral init --gpus 0 writes a configuration for a CPU\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_machine_without_pytorch_is_not_said_to_have_no_gpu(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("trainer.session.gpus.installed", lambda package: None)
    config = parse_config({**NEEDED, "weight_sync": {"backend": "nccl"}})
    assert lack_of_gpus(config, gpus_here()) is not None
    check_gpus_here(config)
