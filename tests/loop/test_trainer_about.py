"""What a run tells the store of itself: at its start, and how it ended."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from runs import until

from services.common.errors import EnvironmentLacks, UserError
from trainer.config.schema import parse_config
from trainer.loop.records.gpu_use import GpuUse
from trainer.loop.records.machine import MachineUse
from trainer.session.about import about_run, described

CONFIG = {
    "run": {"name": "r", "dir": "runs"},
    "model": {"path": "m"},
    "data": {"train": "t"},
    "retriever": {"url": "http://x"},
    "store": {"url": "redis://me:s3cret@host:6379/0"},
    "trainer": {"steps": 12},
}


class Store:
    """A client that keeps what it was handed."""

    def __init__(self):
        self.said = []

    def post_about(self, run, about):
        self.said.append((run, about.model_dump(exclude_unset=True)))


def about():
    return about_run(parse_config(CONFIG), {"torch": "2.10.0", "commit": "abc"}, [])


def test_the_start_holds_the_configuration_without_secrets_and_takes_back_an_earlier_end():
    said = about().model_dump(exclude_unset=True)
    assert said["config"]["trainer"]["steps"] == said["steps"] == 12
    assert "s3cret" not in json.dumps(said) and "host:6379" in said["config"]["store"]["url"]
    assert said["versions"] == {"torch": "2.10.0"} and said["commit"] == "abc"
    assert said["ended"] is None and said["exit"] is None and said["machine"]["memory"].endswith("GiB")


@pytest.mark.parametrize(
    ("error", "number", "status"),
    [
        (None, None, 0),
        (UserError("x"), None, 2),
        (EnvironmentLacks("x"), None, 3),
        (ValueError("x"), None, 1),
        (KeyboardInterrupt(), 15, 143),
    ],
)
def test_the_end_has_the_exit_status_of_the_run(error, number, status):
    store = Store()
    try:
        with described(store, "r", about(), lambda: number):
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    run, said = store.said[-1]
    assert (run, said["exit"]) == ("r", status) and said["ended"] > store.said[0][1]["started"]


class Nvml:
    """NVML with two cards, of which the second is divided and does not tell how busy it is."""

    class NVMLError(Exception):
        pass

    def __init__(self, cards=2):
        self.cards = cards
        self.use = iter([100, 50, 0])

    def nvmlInit(self):
        if not self.cards:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self):
        return self.cards

    def nvmlDeviceGetHandleByIndex(self, number):
        return number

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(used=[20, 60][card], total=80)

    def nvmlDeviceGetUtilizationRates(self, card):
        if card:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=next(self.use))


def test_gpus_are_sampled_since_the_last_step_and_what_is_unknown_is_absent():
    gpus = GpuUse(Nvml(), every_seconds=3600)
    until(lambda: gpus._memory.keys() == {0, 1})  # the thread's own first sample
    gpus.sample()
    assert gpus.metrics() == {"system/gpu_0": 0.75, "system/gpu_memory_0": 0.25, "system/gpu_memory_1": 0.75}
    assert gpus.metrics() == {}
    gpus.sample()
    assert gpus.metrics()["system/gpu_0"] == 0.0
    gpus.end()
    assert GpuUse(Nvml(cards=0)).metrics() == {}


def test_a_sample_of_the_machine_is_in_shares_and_gib():
    found = MachineUse().metrics()
    assert 0 <= found["system/cpu"] <= 1 and 0 < found["system/memory"] < 1
    assert 0.01 < found["system/driver_gib"] < 100
