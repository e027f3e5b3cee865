"""What a checkpoint is made of. Modules move and classes get other names; a run recorded before must go on
after it, so no file may need our code to be read."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from learner_world import make_batch, make_config, make_policy, start_rank
from places import ROOT
from test_trainer_monitor_actions import Scripted, system

from trainer.config.schema import parse_config
from trainer.learner.checkpoint import MANIFEST, fault, written_aside
from trainer.learner.model.model_identity import describe
from trainer.session.resuming.rules import go_on_from, identity_of

OURS = re.compile(r"\b(?:trainer|services|retriever_service|unspiral_health)(?:\.\w+)+")


EARLIER = ROOT / "tests" / "data" / "earlier_checkpoint"
"""State of the driver and counters of the learner at step 4 of a run of an earlier version (82bac2f). Files
of `trainer.loop` and others lay elsewhere then. Paths in it are cut."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A real rank, and its checkpoint with moments, a snapshot, and the state of a driver that has seen some
    steps."""
    folder = tmp_path_factory.mktemp("forms")
    model = make_policy(folder)
    llds = {"llds": {"lambda": 0.2, "anchor": "snapshot", "snapshot_every": 3}}
    rank = start_rank(make_config(model, algorithm=llds), model)
    rank.update(make_batch(seed=3), llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0)
    made = system(folder)
    made.identity = identity_of(made.config, model)
    driver = Scripted(made, {})
    driver.step = 40
    for step in range(1, 41):  # long enough for an alarm, which the state then holds
        reward = 0.5 if step < 20 else 0.0
        driver.monitor.update({"step": step, "probe/lag": -0.3, "reward/mean": reward, "grad_norm": 1.0})
    driver.keep_scores("step40", "greedy", {"em": 0.5, "em_by_source": {"nq": 0.5}})
    driver.best.take(40, 0.5)
    state = driver.state_dict()
    assert state["monitor"]["open"] and state["identity"]["settings"]
    rank.save(str(folder / "step_000040"), state)
    return rank, folder / "step_000040"


@pytest.fixture
def checkpoint(written):
    return written[1]


def strings(value) -> list[str]:
    """All names and texts of a JSON value."""
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (str(key), *strings(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in strings(inner)]
    return [value] if isinstance(value, str) else []


def named_modules(text: str) -> list[str]:
    """Modules of ours whose paths are in a text. `trainer.steps` is a key and no module."""
    found = []
    for path in OURS.findall(text):
        first, second, *_ = path.split(".")
        if importlib.util.find_spec(f"{first}.{second}") is not None:
            found.append(path)
    return found


def test_modules_are_found_by_their_paths():
    assert named_modules("trainer.steps, <class 'trainer.loop.run.best.Best'> services.settings") == [
        "trainer.loop.run.best.Best",
        "services.settings",
    ]


def test_a_checkpoint_is_json_and_tensors_and_names_no_module_of_ours(checkpoint: Path):
    assert fault(checkpoint) is None
    files = [file for file in checkpoint.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    for file in files:
        if file.suffix == ".json":
            texts = strings(json.loads(file.read_text(encoding="utf-8")))
        else:
            data = file.read_bytes()
            header = data[8 : 8 + int.from_bytes(data[:8], "little")]
            texts = strings(json.loads(header))  # a pickle has no such header
        assert [module for text in texts for module in named_modules(text)] == [], file.name


def among(now, known):
    """What `now` has of what was known then; later versions know more."""
    if isinstance(known, dict):
        return {name: among(now[name], known[name]) for name in known}
    if isinstance(known, list) and (len(now) == len(known) or all(isinstance(one, dict) for one in known)):
        return [among(a, b) for a, b in zip(now, known, strict=False)]  # a rule may have further channels
    return now


def test_a_checkpoint_of_an_earlier_version_is_taken_up_whole(written, tmp_path):
    rank, checkpoint = written
    path = tmp_path / "step_000004"
    state = json.loads((EARLIER / "state.json").read_text(encoding="utf-8"))
    with written_aside(path) as aside:
        shutil.copytree(checkpoint, aside, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)
        shutil.copyfile(EARLIER / "learner.json", aside / "learner.json")
        own = state["identity"] | {"model": describe(checkpoint / "model")}
        (aside / "state.json").write_text(json.dumps(state | {"identity": own}))

    # The settings of then are settings of now, and none has another default.
    config = parse_config(state["identity"]["settings"])
    assert go_on_from(path, config, checkpoint / "model", frozenset()).lines == []

    loaded = rank.load(str(path))
    assert (rank.optimiser_steps, rank.batches, rank.engine.adam_steps) == (16, 4, 16)
    driver = Scripted(system(tmp_path / "run"), {})
    driver.load_state_dict(loaded)
    assert (driver.step, driver.version, driver.attempt) == (4, 4, 1)
    assert driver.cursor_state == state["cursor"]
    assert (driver.best.step, driver.best.score, driver.best.at) == (3, 0.0, 3)
    assert driver.scores == state["scores"]
    again = driver.state_dict()
    for part in ("phase", "since", "step", "open"):
        assert again["monitor"][part] == state["monitor"][part]
    known = state["monitor"]["detectors"]
    assert among(again["monitor"]["detectors"], known) == known
    driver.monitor.update({"step": 5, "reward/mean": 0.5, "grad_norm": 1.0})
