"""The configuration: what a user may write, and the one line that he gets for a mistake."""

import json
import math
import re
from types import SimpleNamespace
from typing import get_args

import pytest
from places import ROOT

from services.common.errors import UserError
from trainer.algorithm_names import PolicyLossKind
from trainer.config.algorithm import LLDSSettings
from trainer.config.remarks import remarks
from trainer.config.schema import Config, dump_config, load_config, parse_config
from trainer.config.used_with import UsedWith
from trainer.rewards import ACCEPTED

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "retriever": {"corpus": "c.jsonl"}}
PROMISED = {
    "grpo": ("grpo", (0.2, 0.2), 0, None),
    "grpo_seq": ("grpo", (0.2, 0.2), 0, None),
    "dapo": ("grpo", (0.2, 0.28), 10, None),
    "gspo": ("grpo", (3e-4, 4e-4), 0, None),
    "dr_grpo": ("dr_grpo", (0.2, 0.2), 0, 500 * 5),
    "cispo": ("grpo", (1.0, 0.2), 0, None),
    "clip_cov": ("grpo", (1.0, 1.0), 0, None),
    "kl_cov": ("grpo", (0.2, 0.2), 0, None),
}
"""By loss: advantage, clip epsilons, rounds of dynamic sampling, tokens that divide the sum."""
*_FIRST, LAST = (repr(loss) for loss in get_args(PolicyLossKind))
QUOTED = ", ".join(_FIRST)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(BASE))
    return path


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.learning_rate=1", "learner.learning_rate: unknown key; did you mean learner.lr?"),
        ("data.train_files=x", "data.train_files: unknown key; did you mean data.train?"),
        ("actor_rollout_ref.rollout.n=5", "actor_rollout_ref: unknown key; did you mean rollout.group_size?"),
        ("trainer.save_freq=5", "trainer.save_freq: unknown key; did you mean trainer.checkpoint_every?"),
        ("clip_ratio=.2", "clip_ratio: unknown key; did you mean algorithm.clip_low or algorithm.clip_high?"),
        (
            "retriever.index=x",
            "retriever: give one of url, index, corpus; got index and corpus. For index alone "
            "set the others to null, as in retriever.corpus=null",
        ),
        ("learner.lrr=1", "learner.lrr: unknown key; did you mean learner.lr?"),
        ("rollot.workers=2", "rollot: unknown key; did you mean rollout?"),
        ("algorithm.llds.lamda=1", "algorithm.llds.lamda: unknown key; did you mean algorithm.llds.lambda?"),
        ("steps=3", "steps: unknown key; did you mean trainer.steps?"),
        ("learner.group_size=8", "learner.group_size: unknown key; did you mean rollout.group_size?"),
        (
            "learner.lr=fast",
            "learner.lr: expected a number (got 'fast')",
        ),
        ("rollout.workers=0", "rollout.workers: expected at least 1 (got 0)"),
        ("rollout.workers=many", "rollout.workers"),
        ("seed=true", "seed=true: expected a value, not true or false"),
        (
            "tracking.wandb=true",
            "tracking: wandb=true: expected a text, not true or false: Weights & Biases project",
        ),
        ("algorithm.llds.lambda=true", "algorithm.llds: lambda=true: expected a value, not true or false: "),
        (
            "reward.kind=zz",
            f"reward.kind: {ACCEPTED} (got 'zz')",
        ),
        (
            "algorithm.loss=ppo",
            f"algorithm.loss: expected {QUOTED} or {LAST}, or an import path package.module:function "
            "(got 'ppo')",
        ),
        ("learner.betas=[1.0, 0.9]", "learner.betas.0: expected below 1 (got 1.0)"),
        ("retriever.url=http://x", "retriever: give one of url, index, corpus; got url and corpus"),
        ("run.name=../x", "run.name"),
        ("model=x", "model"),
        ("model.path=", "model.path: expected text (got nothing)"),
        ("nonsense", "override 'nonsense': expected key=value, such as learner.lr=1e-5"),
        ("seed.x=1", "override 'seed.x=1': seed is a value, not a section"),
        ("learner.lr=[1", "override 'learner.lr=[1': value is not YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(file, override, expected):
    if override == "seed.x=1":
        file.write_text(json.dumps(BASE | {"seed": 1}))
    with pytest.raises(UserError) as e:
        load_config(file, [override])
    assert str(e.value).startswith(expected)
    assert "\n" not in str(e.value)
    assert e.value.exit_code == 2


def test_every_mistake_has_a_line(file):
    raw = {k: v for k, v in BASE.items() if k != "model"}
    file.write_text(json.dumps(raw | {"learnr": {"lr": 1}, "rollout": {"workers": "many"}}))
    with pytest.raises(UserError) as e:
        load_config(file, ["trainer.steps=-1", "trainer.stepps=3", "learner.lr=abc"])
    written = [line for line in str(e.value).splitlines() if line.startswith(f"{file}")]
    typed = [line.partition(":")[0] for line in str(e.value).splitlines() if line not in written]
    assert sorted(typed) == ["learner.lr", "trainer.stepps", "trainer.steps"]
    heads = (f"{file}, line 1: learnr: ", f"{file}, line 1: rollout.workers: ", f"{file}: model: ")
    assert all(line.startswith(heads) for line in written) and len(written) == 3
    with pytest.raises(UserError) as e:
        load_config(file, [f"learner.x{n}=1" for n in range(20)])
    assert len(str(e.value).splitlines()) == 11 and str(e.value).endswith("\n... and 13 more")


def test_a_missing_key_is_named():
    with pytest.raises(UserError, match=r"^model: required, and not given$"):
        parse_config({k: v for k, v in BASE.items() if k != "model"})


def test_a_missing_file_a_non_mapping_and_broken_yaml_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(UserError, match="expected sections"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(UserError, match="not YAML"):
        load_config(tmp_path / "bad.yaml")


def test_words_like_off_and_numbers_like_1e_4_mean_what_they_look_like(file):
    config = load_config(
        file, ["algorithm.importance.mode=off", "learner.lr=1e-4", "algorithm.llds.answer_weight=off"]
    )
    assert config.algorithm.importance.mode == "off"
    assert config.learner.lr == 1e-4


@pytest.mark.parametrize("top", ["top_p=0.9", "top_k=50"])
def test_samplers_that_change_the_support_are_refused(file, top):
    with pytest.raises(UserError, match=f"rollout.{top.split('=')[0]}"):
        load_config(file, [f"rollout.{top}"])


def test_llds_that_can_never_act_is_refused_with_the_reason(file):
    with pytest.raises(UserError, match="can never act with one optimiser step per batch"):
        load_config(file, ["learner.minibatches_per_batch=1"])
    for way_out in ("learner.epochs=2", "algorithm.llds.anchor=snapshot", "algorithm.llds.lambda=0"):
        load_config(file, ["learner.minibatches_per_batch=1", way_out])
    with pytest.raises(UserError, match="compares the weights with themselves"):
        load_config(
            file,
            [
                "learner.minibatches_per_batch=1",
                "algorithm.llds.anchor=snapshot",
                "algorithm.llds.snapshot_every=1",
            ],
        )


def test_more_minibatches_than_trajectories_are_refused(file):
    with pytest.raises(UserError, match="more than the 4 trajectories"):
        load_config(
            file, ["rollout.prompts_per_step=2", "rollout.group_size=2", "learner.minibatches_per_batch=5"]
        )


@pytest.mark.parametrize("advantage", ["rloo", "dr_grpo"])
def test_groups_of_one_that_could_never_learn_are_refused(file, advantage):
    with pytest.raises(UserError, match=r"rollout\.group_size=1 can never learn"):
        load_config(file, ["rollout.group_size=1", f"algorithm.advantage={advantage}"])
    assert load_config(file, ["rollout.group_size=1"]).algorithm.advantage == "grpo"


def test_staleness_turns_the_importance_correction_on_unless_the_user_chose(file):
    assert load_config(file, ["rollout.max_staleness=1"]).algorithm.importance.mode == "token"
    assert (
        load_config(
            file, ["rollout.max_staleness=1", "algorithm.importance.mode=off"]
        ).algorithm.importance.mode
        == "off"
    )
    assert load_config(file).algorithm.importance.mode == "off"


def test_what_is_dumped_loads_as_the_same_configuration(file, tmp_path):
    config = load_config(
        file, ["algorithm.llds.lambda=0.3", "rollout.workers=all", "algorithm.llds.min_drop=0.001"]
    )
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_the_schema_describes_every_key():
    def undescribed(schema, path=""):
        for name, field in schema.get("properties", {}).items():
            if "$ref" in field or "allOf" in field:
                continue
            if "description" not in field and not any("$ref" in str(o) for o in field.get("anyOf", [])):
                yield f"{path}{name}"

    schema = Config.model_json_schema(by_alias=True)
    missing = [n for name, d in schema["$defs"].items() for n in undescribed(d, f"{name}.")]
    assert missing == []


def test_an_action_on_lambda_that_could_never_act_is_refused(file):
    without_llds = [
        "monitor.action=raise_lambda",
        "algorithm.llds.lambda=0",
        "learner.minibatches_per_batch=1",
    ]
    with pytest.raises(
        UserError, match=r"^monitor\.action=raise_lambda can never act with one optimiser step per batch"
    ):
        load_config(file, without_llds)
    for way_out in ("learner.epochs=2", "algorithm.llds.anchor=snapshot"):
        load_config(file, [*without_llds, way_out])


def test_a_lag_that_a_running_service_does_not_keep_is_refused(file):
    with pytest.raises(UserError, match=r"^probe\.lag_steps=8 must be below store\.token_steps=8"):
        load_config(file, ["store.url=http://h:8100", "probe.lag_steps=8"])
    load_config(file, ["store.url=http://h:8100", "probe.lag_steps=8", "store.token_steps=9"])
    load_config(file, ["probe.lag_steps=8"])  # a service that the run starts keeps as many as the probe needs


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:secret@h:6379/0", "redis://***@h:6379/0"),
        (
            "redis://:secret@h/0?socket_timeout=3&password=secret",
            "redis://***@h/0?socket_timeout=3&password=***",
        ),
        ("http://h:8100/a@b", "http://h:8100/a@b"),
    ],
)
def test_passwords_in_addresses_are_masked_where_the_configuration_is_shown(file, url, shown):
    config = load_config(file, [f"store.url={url!r}"])
    assert f"url: {shown}" in dump_config(config, secrets=False).replace("'", "")
    assert url in dump_config(config).replace("'", "")


def algorithm(settings, **sections):
    return parse_config(BASE | {"algorithm": settings} | sections).algorithm


@pytest.mark.parametrize("loss", get_args(PolicyLossKind))
def test_a_loss_brings_what_its_name_promises_and_the_resolved_configuration_shows_it(loss):
    advantage, clips, rounds, tokens = PROMISED[loss]
    for a in (
        algorithm({"loss": loss}),
        parse_config(json_of(parse_config(BASE | {"algorithm": {"loss": loss}}))).algorithm,
    ):
        assert (a.advantage, (a.clip_low, a.clip_high)) == (advantage, clips)
        assert (a.dynamic_sampling, a.dr_grpo_tokens) == (rounds, tokens)


def json_of(config):
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(dump_config(config))


def test_what_the_user_sets_wins_over_the_name_and_a_line_says_so():
    given = {"loss": "dapo", "clip_high": 0.2, "dynamic_sampling": 0}
    config = parse_config(BASE | {"algorithm": given})
    assert (config.algorithm.clip_high, config.algorithm.dynamic_sampling) == (0.2, 0)
    assert remarks(config) == [
        "algorithm.loss=dapo runs with algorithm.clip_high=0.2; its own is 0.28",
        "algorithm.loss=dapo runs with algorithm.dynamic_sampling=0; its own is 10",
        "algorithm.loss=dapo runs without its length penalty; algorithm.overlong.tokens sets it",
    ]
    whole = {"loss": "dapo", "dynamic_sampling": 3, "overlong": {"tokens": 100}}
    assert remarks(parse_config(BASE | {"algorithm": whole})) == []
    assert remarks(parse_config(BASE | {"algorithm": {"clip_high": 0.28}})) == []  # grpo promises no clip


def test_answers_without_others_to_compare_with_are_remarked():
    alone = {"rollout": {"group_size": 1}, "algorithm": {"llds": {"lambda": 0.0}}}
    (line,) = remarks(parse_config(BASE | alone))
    assert line.startswith("rollout.group_size=1: an answer has no other to be compared with")


def test_the_configuration_of_a_run_from_before_the_presets_keeps_its_values():
    older = json_of(parse_config(BASE))
    older["algorithm"] |= {"loss": "gspo", "clip_low": 0.2, "clip_high": 0.2}
    kept = parse_config(older).algorithm
    assert (kept.clip_low, kept.clip_high, kept.advantage) == (0.2, 0.2, "grpo")


def test_dynamic_sampling_is_left_out_where_staleness_excludes_it_unless_the_user_asks_for_both():
    config = parse_config(BASE | {"algorithm": {"loss": "dapo"}, "rollout": {"max_staleness": 1}})
    assert (
        config.algorithm.dynamic_sampling == 0 and "rollout.max_staleness=1 excludes it" in remarks(config)[0]
    )
    with pytest.raises(UserError, match=r"dynamic_sampling needs rollout\.max_staleness=0"):
        algorithm({"loss": "dapo", "dynamic_sampling": 2}, rollout={"max_staleness": 1})


def test_a_setting_that_does_nothing_is_named():
    given = {"overlong": {"penalty": 0.5}, "llds": {"snapshot_every": 5}, "dr_grpo_tokens": 9}
    assert remarks(parse_config(BASE | {"algorithm": given})) == [
        "algorithm.dr_grpo_tokens=9 does nothing: it needs algorithm.loss=dr_grpo",
        "algorithm.overlong.penalty=0.5 does nothing: it needs algorithm.overlong.tokens other than 0",
        "algorithm.llds.snapshot_every=5 does nothing: it needs algorithm.llds.anchor=snapshot",
    ]


def test_a_key_may_be_used_with_several_values():
    either = UsedWith("loss", "dapo", "cispo")
    neither = UsedWith("loss", "dapo", "cispo", unlike=True)
    uses = [(either.is_used(s), neither.is_used(s)) for s in map(_with_loss, ("dapo", "cispo", "grpo"))]
    assert uses == [(True, False), (True, False), (False, True)]
    assert (str(either), str(neither)) == ("loss=dapo or cispo", "loss other than dapo or cispo")


def _with_loss(loss):
    return SimpleNamespace(loss=loss)


def test_the_table_of_the_docs_is_what_the_names_bring():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:] for row in page.splitlines() if row.startswith("| `") and row.count("|") == 7]
    assert [cell.strip() for cell in rows.pop(0)[:2]] == ["`loss`", "`advantage`"]
    seen = set()
    for names, *cells in rows:
        for loss in re.findall(r"`(\w+)`", names):
            a = algorithm({"loss": loss})
            first = [cell.split()[0].strip("`") for cell in cells[:4]]
            assert (first[0], first[3]) == (a.advantage, str(a.dynamic_sampling))
            assert (float(first[1]), float(first[2])) == (a.clip_low, a.clip_high)
            seen.add(loss)
    assert seen == set(get_args(PolicyLossKind))


def test_the_form_of_llds_decides_its_gate_and_the_least_drop_that_counts():
    plain = LLDSSettings(gate="response")
    assert (plain.unit, plain.least_drop(0.01)) == ("response", 0.01)
    sapo = LLDSSettings(form="sapo_search", ratio_below=0.5)
    assert (sapo.unit, sapo.least_drop(0.01)) == ("token", math.log(2))
    assert sapo.least_drop(0.9) == 0.9, "noise of re-scoring counts in neither form"
