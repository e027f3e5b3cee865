"""What a resumed run may change: each key has a rule, and what is refused names the key and both values."""

from __future__ import annotations

import asyncio
import json
import re
import shutil

import pytest
import torch
from checkpoint_files import fill
from places import ROOT
from safetensors.torch import save_file
from scripted_runs import started, trained
from test_bad_input import call
from test_trainer_monitor_actions import Scripted, system

from services.common.errors import UserError
from services.contracts import Question
from trainer.config.schema import leaf_keys, parse_config
from trainer.data.cursor import PromptCursor
from trainer.data.questions import load_questions
from trainer.learner.checkpoint import latest, step_folder, written_aside
from trainer.learner.group import LearnerError
from trainer.learner.model.model_identity import describe, differences
from trainer.loop.keeping import restore
from trainer.session.resuming import rules as resume_rules
from trainer.session.resuming.rules import GROUPS, RULES, go_on_from, identity_of
from trainer.session.run import checkpoint_of

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n"
BEGAN = {
    "seed": 1,
    "rollout": {"template": "lab"},
    "reward": {"kind": "em"},
    "learner": {"lora": {"rank": 16, "alpha": 8.0}},
}


def make_model(folder, *, weight=0.0, rope=10000.0, eps=1e-6, words=("a", "b")):
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen3", "rope_theta": rope, "rms_norm_eps": eps, "transformers_version": "5"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {w: i for i, w in enumerate(words)}}})
    )
    save_file({"a": torch.full((4, 4), weight), "b": torch.ones(2)}, folder / "model.safetensors")
    return folder


def raw_of(tmp_path, **sections):
    return {
        "run": {"name": "r", "dir": str(tmp_path)},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "q.jsonl")},
        "retriever": {"url": "http://127.0.0.1:1"},
    } | sections


def write_checkpoint(tmp_path, config, step=4, **state):
    """As a run with this configuration and model leaves it."""
    model = tmp_path / "model"
    path = step_folder(config.run_dir, step)
    with written_aside(path) as folder:
        fill(folder, {"identity": identity_of(config, model)} | state)
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(model / name, folder / "model" / name)
        lora = config.learner.lora
        about = {"rank": lora.rank, "alpha": lora.alpha, "scale": lora.alpha / lora.rank} if lora else None
        (folder / "learner.json").write_text(json.dumps({"adam_steps": 0, "snapshot": False, "lora": about}))
    return path


@pytest.fixture
def begun(tmp_path):
    """A run's folder with a checkpoint, and its configuration file."""
    make_model(tmp_path / "model")
    config = parse_config(raw_of(tmp_path, **BEGAN))
    write_checkpoint(tmp_path, config)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 4}\n')
    (config.run_dir / "config.yaml").write_text("as it was")
    (config.run_dir / "summary.json").write_text('{"exit": 0}')
    (tmp_path / "run.yaml").write_text(json.dumps(raw_of(tmp_path, **BEGAN)))
    return tmp_path


def test_every_key_of_the_configuration_has_one_rule():
    keys = [key for group in GROUPS for key in group.keys]
    assert sorted(keys) == sorted(leaf_keys()) and len(keys) == len(set(keys)) == len(RULES)


@pytest.mark.parametrize("unknown", [("evaluation", "retriever"), ("evaluation",), ("tracking", "wandb")])
def test_a_section_that_an_earlier_version_did_not_know_was_not_given(tmp_path, unknown):
    config = parse_config(raw_of(tmp_path, **BEGAN))
    before = identity_of(config, make_model(tmp_path / "model"))["settings"]
    *sections, last = unknown
    holder = before
    for section in sections:
        holder = holder[section]
    holder.pop(last)
    assert resume_rules._settings(before, config) == []


def test_the_lists_in_the_docs_are_those_that_the_rules_make():
    assert resume_rules.table() in (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.lora.alpha=64", "learner.lora.alpha: the run began with 8.0 and cannot go on with 64.0"),
        ("learner.lora.rank=8", "learner.lora.rank: the run began with 16 and cannot go on with 8"),
        (
            "learner.lora=null",
            "learner.lora.rank: the run began with adapters and cannot go on with all weights",
        ),
        ("seed=2", "seed: the run began with 1 and cannot go on with 2"),
        (
            "rollout.template=search_r1",
            "rollout.template: the run began with lab and cannot go on with search_r1",
        ),
        ("reward.kind=f1", "reward.kind: the run began with em and cannot go on with f1"),
        ("data.shuffle=false", "data.shuffle: the run began with true and cannot go on with false"),
    ],
)
def test_a_setting_that_would_make_it_another_run_is_refused(begun, override, said):
    status, _, err = call("train", "--config", begun / "run.yaml", override, "--resume", "latest")
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith(f"unspiral: {said}: "), err
    run = begun / "r"
    assert (run / "config.yaml").read_text() == "as it was" and (
        run / "summary.json"
    ).read_text() == '{"exit": 0}'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rope": 20000.0},
            "config.json: rope_theta: the run began with 10000.0 and cannot go on with 20000.0",
        ),
        ({"eps": 1e-5}, "config.json: rms_norm_eps: the run began with 1e-06 and cannot go on with 1e-05"),
        ({"words": ("b", "a")}, "tokenizer: tokenizer.json: the run began with "),
        ({"weight": 1.0}, "base weights: the run began with "),
    ],
)
@pytest.mark.parametrize("resume", ["latest", "path"])
def test_another_model_in_the_same_folder_is_refused(begun, change, said, resume):
    make_model(begun / "model", **change)
    where = "latest" if resume == "latest" else latest(begun / "r")
    status, _, err = call("train", "--config", begun / "run.yaml", "--resume", where)
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith(f"unspiral: model.path: {said}"), err
    assert "--allow-changed model.path goes on all the same" in err


def test_the_same_model_elsewhere_is_the_same_one(begun):
    moved = make_model(begun / "elsewhere")
    (moved / "config.json").write_text(json.dumps(json.loads((moved / "config.json").read_text()), indent=4))
    (moved / "model.safetensors").unlink()
    save_file({"a": torch.zeros(4, 4)}, moved / "model-00001.safetensors")
    save_file({"b": torch.ones(2)}, moved / "model-00002.safetensors")
    config = parse_config(raw_of(begun, **BEGAN, model={"path": str(moved)}))
    assert go_on_from(latest(begun / "r"), config, moved, frozenset()).lines == []


def test_base_weights_count_only_where_the_run_needs_them(tmp_path):
    before, now = describe(make_model(tmp_path / "a")), describe(make_model(tmp_path / "b", weight=1.0))
    assert differences(before, now, weights=False) == []
    assert [d.what for d in differences(before, now, weights=True)] == ["base weights"]


def test_what_is_free_is_said_in_one_line_and_what_is_not_in_a_warning_each(begun):
    sections = BEGAN | {
        "learner": BEGAN["learner"] | {"lr": 5e-6},
        "algorithm": {"llds": {"lambda": 0.3}},
        "rollout": {"template": "lab", "group_size": 8},
        "trainer": {"steps": 200},
    }
    config = parse_config(raw_of(begun, **sections))
    lines = go_on_from(latest(begun / "r"), config, begun / "model", frozenset()).lines
    assert lines[0].startswith("warning: rollout.group_size was 5 and is 8 now: ")
    assert lines[1:] == [
        "changed since the checkpoint: learner.lr 1e-06 -> 5e-06, algorithm.llds.lambda 0.2 -> 0.3, "
        "trainer.steps 100 -> 200"
    ]


def test_a_change_that_is_allowed_goes_on_with_a_warning(begun):
    make_model(begun / "model", rope=20000.0)
    config = parse_config(raw_of(begun, **BEGAN | {"reward": {"kind": "f1"}}))
    with pytest.raises(
        UserError, match=r"model\.path: config\.json: rope_theta.*\(also changed: reward\.kind\)"
    ):
        go_on_from(latest(begun / "r"), config, begun / "model", frozenset())
    with pytest.raises(UserError, match=r"^reward\.kind: the run began with em"):
        go_on_from(latest(begun / "r"), config, begun / "model", frozenset({"model.path"}))
    lines = go_on_from(
        latest(begun / "r"), config, begun / "model", frozenset({"model.path", "reward.kind"})
    ).lines
    assert [line.split(":")[1] for line in lines] == [" model.path", " reward.kind was em and is f1 now"]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("reward.knid", "--allow-changed reward.knid: no such key; did you mean reward.kind?"),
        ("learner.lora.alpha", "--allow-changed learner.lora.alpha: cannot change on resume"),
    ],
)
def test_a_key_that_can_not_be_allowed_is_named(begun, key, said):
    arguments = ("train", "--config", begun / "run.yaml", "--resume", "latest", "--allow-changed", key)
    status, _, err = call(*arguments)
    assert (status, err.count("\n")) == (2, 1) and err.startswith(f"unspiral: {said}"), err


def test_allowing_a_change_without_a_resume_is_a_mistake(begun):
    status, _, err = call("train", "--config", begun / "run.yaml", "--allow-changed", "seed")
    assert status == 2 and "--resume latest" in err, err


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from_with_a_warning(begun):
    path = latest(begun / "r")
    with written_aside(path) as folder:
        shutil.copytree(step_folder(begun / "r", 4), folder, dirs_exist_ok=True)
        (folder / "state.json").write_text("{}")
        (folder / "learner.json").write_text('{"adam_steps": 0, "lora": {"base": "x", "scale": 0.5}}')
        (folder / "manifest.json").unlink()
    config = parse_config(raw_of(begun, **BEGAN | {"reward": {"kind": "f1"}}))
    (line,) = go_on_from(path, config, begun / "model", frozenset()).lines
    assert line.startswith("warning: step_000004 is of an earlier version, which kept no settings: ")
    config.learner.lora.alpha = 64.0
    with pytest.raises(
        UserError, match=r"^learner\.lora\.alpha: the run began with alpha / rank = 0\.5 .* with 4:"
    ):
        go_on_from(path, config, begun / "model", frozenset())
    config.learner.lora.alpha = 8.0
    make_model(begun / "model", eps=1e-5)
    with pytest.raises(UserError, match="rms_norm_eps"):
        go_on_from(path, config, begun / "model", frozenset())


def test_a_run_keeps_what_it_is_in_each_checkpoint(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch)
    trained(made)
    identity = json.loads((latest(made.folder.path) / "state.json").read_text())["identity"]
    assert (
        identity["settings"]["reward"]
        == {"kind": "em", "right_at": None, "timeout_seconds": 600.0, "concurrency": 1}
        and identity["settings"]["learner"]["lora"] is None
    )
    assert identity["model"]["config"] == {"model_type": "qwen3"}
    made.config.seed = 5
    with pytest.raises(UserError, match=r"^seed: the run began with 0 and cannot go on with 5: "):
        trained(made, resume="latest")
    made.config.trainer.steps = 14
    _, out = trained(made, resume="latest", allow_changed=["seed"])
    assert "warning: seed was 0 and is 5 now: " in out
    assert "changed since the checkpoint: trainer.steps 12 -> 14" in out


def test_a_password_is_not_kept(tmp_path):
    make_model(tmp_path / "model")
    config = parse_config(raw_of(tmp_path, store={"url": "redis://me:secret@host:1/0"}))
    assert "secret" not in json.dumps(identity_of(config, tmp_path / "model"))


def questions(n, text="q"):
    return [Question(str(i), f"{text}{i}", ("a",), "s") for i in range(n)]


@pytest.mark.parametrize(
    ("key", "cursor"),
    [
        ("seed", lambda **options: PromptCursor(questions(10), 2, True, **options)),
        ("data.shuffle", lambda **options: PromptCursor(questions(10), 1, False, **options)),
        ("data.train", lambda **options: PromptCursor(questions(7, "other"), 1, True, **options)),
    ],
)
def test_other_prompts_begin_a_new_pass_where_that_is_allowed(key, cursor):
    before = PromptCursor(questions(10), 1, True)
    before.take(4)
    with pytest.raises(UserError, match=f"^{key}: "):
        cursor().load_state_dict(before.state_dict())
    going_on = cursor(may_change=frozenset({key}))
    going_on.load_state_dict(before.state_dict())
    assert (going_on.epoch, going_on.position) == (1, 0)
    assert len({q.id for q in going_on.take(7)}) == 7


def test_a_learner_is_not_restored_from_a_folder_that_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(restore, "FIRST_BACK_OFF_SECONDS", 0.0)
    made = system(tmp_path)
    made.learner.model_path = str(make_model(tmp_path / "model"))
    made.identity = identity_of(made.config, tmp_path / "model")

    class Losing(Scripted):
        async def one_step(self, step):
            if step == 4 and not self.restores:
                make_model(tmp_path / "model", rope=5.0)
                raise LearnerError("learner rank 0 of 1 died (update)")
            return await super().one_step(step)

    with pytest.raises(
        UserError, match=r"has changed since the run began.*rope_theta was 10000\.0 and is 5\.0"
    ):
        asyncio.run(Losing(made, {}).run())
    assert made.learner.starts == 0


def as_it_was(run):
    """The contents of a run's folder."""
    return {f.relative_to(run): f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != ".lock"}


def test_an_empty_resume_is_a_mistake_and_begins_nothing_anew(begun):
    before = as_it_was(begun / "r")
    for given in ("", " "):
        status, _, err = call("train", "--config", begun / "run.yaml", "--resume", given)
        assert (status, err.count("\n")) == (2, 1), err
        assert err.startswith("unspiral: --resume: given without a value; accepted: latest, "), err
    assert as_it_was(begun / "r") == before


def test_other_questions_are_refused_before_the_folder_is_written_to(begun):
    asked = begun / "q.jsonl"
    asked.write_text('{"id": "1", "question": "Who?", "golden_answers": ["a"]}\n')
    config = parse_config(raw_of(begun, **BEGAN))
    cursor = PromptCursor(load_questions(str(asked)).rows, config.seed, config.data.shuffle)
    write_checkpoint(begun, config, cursor=cursor.state_dict())
    asked.write_text('{"id": "1", "question": "Where?", "golden_answers": ["a"]}\n')
    before = as_it_was(begun / "r")
    status, _, err = call("train", "--config", begun / "run.yaml", "--resume", "latest")
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("unspiral: data.train: not the questions that the run began with"), err
    assert as_it_was(begun / "r") == before


def test_a_checkpoint_of_another_run_does_not_write_over_one_that_has_its_own(begun):
    other = parse_config(raw_of(begun, **BEGAN, run={"name": "other", "dir": str(begun)}))
    step_10 = write_checkpoint(begun, other, step=10)
    before = as_it_was(begun / "r")
    status, _, err = call("train", "--config", begun / "run.yaml", "--resume", step_10)
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith(f"unspiral: run.name: {begun / 'r'} holds a run already, at step 4, "), err
    assert as_it_was(begun / "r") == before


def test_a_run_whose_checkpoints_are_links_is_the_same_one(begun):
    run = begun / "r"
    shutil.move(run / "checkpoints", begun / "large_disk")
    (run / "checkpoints").symlink_to(begun / "large_disk")
    path = step_folder(run, 4)
    assert checkpoint_of(str(path), run) == path
    path.rename(begun / "archived")
    path.symlink_to(begun / "archived")
    assert checkpoint_of(str(path), run) == path


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", LFS_POINTER, "is no whole safetensors file: .*; fetch it with git lfs pull"),
        ("model.safetensors", b"", "is no whole safetensors file: a header of 0 bytes"),
        ("model.safetensors", b"\x40" + bytes(7) + b'{"a":', "a header of 64 bytes in a file of 13"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "is no whole safetensors file"),
        ("tokenizer.json", LFS_POINTER, "is no whole JSON file: .*; fetch it with git lfs pull"),
        ("tokenizer_config.json", b"{", "is no whole JSON file: "),
    ],
)
def test_a_torn_model_file_is_named_in_one_line(begun, name, content, said):
    (begun / "model" / name).write_bytes(content)
    status, _, err = call("train", "--config", begun / "run.yaml", "--resume", "latest")
    assert (status, err.count("\n")) == (2, 1), err
    assert re.match(f"unspiral: model.path: {begun / 'model' / name} .*{said}", err), err


def test_weights_that_were_cut_short_are_not_taken_for_whole_ones(begun):
    weights = begun / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors is no whole safetensors file: . lies beyond"):
        describe(begun / "model")
