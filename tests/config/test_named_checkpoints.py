"""The papers' checkpoints by name: listed with how they are asked, taken from the hub's cache, and never
waited for where there is no network."""

from __future__ import annotations

import json

import pytest

from services.common.errors import EnvironmentLacks
from services.settings import RolloutSettings
from trainer.commands.cli import main
from trainer.commands.models import printed
from trainer.data import models
from trainer.data.checkpoints import BY_HUB_NAME, CHECKPOINTS, asked_otherwise, known
from trainer.suite.shown.published import PUBLISHED

NAME = "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-3b-it-em-grpo"


def listed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["model", "list", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_list_says_how_each_is_asked_and_whose_figure_stands_there(capsys):
    out = listed(capsys)
    first = out.splitlines()
    assert first[0] == "Models that come in a package, by `unspiral model fetch NAME`:"
    assert first[2] == "smollm2-135m" and "SmolLM2-135M-Instruct, " in first[3]
    assert "269 MB, made from" in first[4]
    assert f"0.336 {NAME}, -v0.2, -v0.3\n" in out and len(first) <= 35 and "not measured here" in out
    assert all(len(line) <= 80 for line in first if "/models/" not in line)
    names = [line[6:].partition(", ")[0] for line in first]
    assert [n for n in names if n in BY_HUB_NAME] == [c.hub for c in CHECKPOINTS if c.hub]
    out = listed(capsys, "--papers")
    assert out.startswith("Checkpoints of the papers.")
    block = out[out.index(f"{NAME}: ") :].split("\n\n")[0]
    assert "Qwen2.5-3B-Instruct, GRPO; EM 0.336 (arXiv 2512.04220 v2)" in block
    assert "base Qwen/Qwen2.5-3B-Instruct; rollout.template=search_r1 rollout.reading=search_r1" in block
    assert "rollout.topk=3 rollout.max_turns=4" in block and "e5-base-v2" in block
    assert "  tags <think> <search> <information> <answer>\n" in block
    assert f"  later releases: {NAME}-v0.2, {NAME}-v0.3" in block and "not measured here" in out
    whole = json.loads(listed(capsys, "--json"))
    assert whole["packaged"]["smollm2-135m"]["size"].startswith("269 MB")
    (one,) = (c for c in whole["checkpoints"] if c["hub"] == NAME)
    assert one["published"]["source"] == "arXiv 2512.04220 v2" and not one["published"]["measured_here"]
    assert one["published"]["em"]["nq"] == 0.397 and one["published"]["em"]["macro"] == 0.336
    assert one["later"] == [f"{NAME}-v0.2", f"{NAME}-v0.3"]


def test_each_entry_makes_settings_and_every_trained_row_of_a_paper_has_its_entry():
    for one in CHECKPOINTS:
        given = {"template": one.template, "reading": one.reading, "bos": one.bos}
        RolloutSettings(**given, topk=one.topk, max_turns=one.max_turns)
    trained = {(r.model, r.method) for r in PUBLISHED if "PPO" in r.method or "LLDS" in r.method}
    assert trained == {(c.model, c.method) for c in CHECKPOINTS if printed(c) and c.method != "GRPO"}
    named = [name for one in CHECKPOINTS if one.hub for name in (one.hub, *one.later)]
    assert len(named) == len(set(named)) == len(BY_HUB_NAME) and not any(
        c.later for c in CHECKPOINTS if not c.hub
    )


def test_releases_of_search_r1_go_by_names_that_were_published():
    """Of the 7B by GRPO none was found without a suffix, and of the 14B none before -v0.2."""
    stem = "PeterJinGo/SearchR1-nq_hotpotqa_train-"
    grpo = [name.removeprefix(stem) for name in BY_HUB_NAME if "7b-em-grpo" in name]
    assert grpo == ["qwen2.5-7b-em-grpo-v0.2", "qwen2.5-7b-em-grpo-v0.3"]
    large = BY_HUB_NAME[f"{stem}qwen2.5-14b-em-ppo-v0.3"]
    assert (large.base, printed(large).macro) == ("Qwen/Qwen2.5-14B", 0.479)
    assert BY_HUB_NAME[f"{stem}qwen2.5-32b-em-grpo-v0.3"].max_turns == 4


def test_the_weights_of_llds_that_are_on_the_hub_have_their_names(capsys):
    assert "\n0.451 SEGAgentRL/LLDS-A-GSPO-Qwen2.5-3B-Ins\n" in listed(capsys)
    out = listed(capsys, "--papers")
    action = "SEGAgentRL/LLDS-A-GSPO-Qwen2.5-3B-Ins: Qwen2.5-3B-Instruct, GSPO + LLDS; EM 0.451"
    response = "SEGAgentRL/LLDS-R-GRPO-Qwen2.5-3B-Base: Qwen2.5-3B-Base, GRPO + LLDS-R; EM not in a table"
    assert action in out and response in out and "no name known here: Qwen2.5-7B-Base, GRPO + LLDS;" in out
    assert asked_otherwise("SEGAgentRL/LLDS-A-GSPO-Qwen2.5-3B-Ins", RolloutSettings(topk=3, max_turns=4)) == [
        "rollout.reading=innermost, trained with search_r1",
        "rollout.max_turns=4, trained with 3",
    ]


def test_a_checkpoint_that_is_asked_otherwise_than_it_was_trained_is_told():
    assert asked_otherwise(NAME, RolloutSettings(topk=5, max_turns=4)) == [
        "rollout.reading=innermost, trained with search_r1",
        "rollout.topk=5, trained with 3",
    ]
    as_trained = RolloutSettings(topk=3, max_turns=4, reading="search_r1")
    assert asked_otherwise(NAME, as_trained) == asked_otherwise("some/model", RolloutSettings()) == []


@pytest.mark.parametrize(
    "folder",
    [
        NAME.rpartition("/")[2],
        f"models/{NAME.rpartition('/')[2]}/",
        f"/data/{NAME}-v0.3",
        f"/home/me/.cache/huggingface/hub/models--{NAME.replace('/', '--')}/snapshots/{'a' * 40}",
    ],
)
def test_a_folder_that_keeps_the_name_is_known_by_it(folder):
    assert asked_otherwise(folder, RolloutSettings(topk=5, max_turns=4, reading="search_r1")) == [
        "rollout.topk=5, trained with 3"
    ]


@pytest.mark.parametrize(
    "folder",
    ["", ".", "/", "models/mine", f"{NAME.rpartition('/')[2]}/mine", "hub/models--me--mine/snapshots/a"],
)
def test_another_folder_is_none_of_them(folder):
    assert known(folder) is None and asked_otherwise(folder, RolloutSettings()) == []


def test_where_the_tokenizer_has_no_chat_template_the_bos_counts():
    stem = "PeterJinGo/SearchR1-nq_hotpotqa_train-llama3.2-3b"
    rollout = RolloutSettings(topk=3, max_turns=4, reading="search_r1")
    assert asked_otherwise(f"{stem}-em-ppo", rollout) == ["rollout.bos=tokenizer, trained with none"]
    assert asked_otherwise(f"{stem}-it-em-ppo", rollout) == []
    assert asked_otherwise(f"{stem}-em-ppo", rollout.model_copy(update={"bos": "none"})) == []


def hub_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_one_in_the_hubs_cache_is_taken_from_there(tmp_path, monkeypatch):
    import huggingface_hub

    folder = tmp_path / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text('{"model_type": "qwen2"}')
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    hub_cache(tmp_path, monkeypatch)
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: real(*a, **k, cache_dir=str(tmp_path))
    )
    assert models.resolve(NAME) == snapshot


def test_without_the_network_one_line_says_what_to_do(tmp_path, monkeypatch):
    hub_cache(tmp_path, monkeypatch)
    said = []
    with pytest.raises(
        EnvironmentLacks, match=f"{NAME}: no such folder, .* fetch it with: hf download {NAME}"
    ) as e:
        models.fetch(NAME, say=said.append)
    assert "\n" not in str(e.value) and said == []


def test_the_check_before_a_run_takes_hub_names_for_models_that_are_there():
    assert all(models.is_there(name) for name in BY_HUB_NAME)
