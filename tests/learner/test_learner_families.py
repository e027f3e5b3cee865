"""The model families of docs/models.md in tiny random form: what the learner takes, and what it refuses."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from learner_world import make_batch, make_config, make_policy, start_rank
from places import ROOT
from test_learner_packed_attention import SMALL

from services.common.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
WINDOW, LAYERS = "uses sliding_window", "layers that do not know where a packed row ends"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "Qwen2": ({}, ""),
    "Qwen3": ({}, ""),
    "Qwen3Moe": (MIXTURE, ""),
    "Qwen3_5": ({}, LAYERS),
    "Llama": ({}, ""),
    "Mistral": ({"sliding_window": None}, ""),
    "Mistral ": ({"sliding_window": 64}, WINDOW),
    "Ministral": ({}, WINDOW),
    "Mixtral": ({"num_local_experts": 4}, ""),
    "Gemma": ({}, ""),
    "Gemma3": ({}, WINDOW),
    "Phi": ({}, ""),
    "Phi3": ({}, ""),
    "Phi3 ": ({"sliding_window": 64}, WINDOW),
    "Olmo2": ({}, ""),
    "SmolLM3": ({}, ""),
    "Glm4": ({}, ""),
}
"""A family: further values of its configuration, why packed rows are refused. With a blank: another form."""
REFUSED = {
    "Gemma2": ({}, "changes its logits after the head"),
    "Granite": ({"logits_scaling": 8.0}, "changes its logits after the head"),
    "Cohere": ({"logit_scale": 0.5}, "changes its logits after the head"),
    "GptOss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "has attention of its own, which the learner does not compute",
    ),
}
EXPERTS = ("Qwen3Moe", "Mixtral")
"""Whose adapters are of attention alone."""
TEXT = ("Gemma3", "Qwen3_5")
"""Configurations of their text alone have a name of their own."""


def made(family, values, folder):
    make_policy(folder)  # for its tokenizer
    torch.manual_seed(0)
    name = family.strip()
    config = getattr(transformers, f"{name}{'Text' if name in TEXT else ''}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**(SMALL | SPECIAL | values)))
    model.save_pretrained(folder)
    return folder


def step(folder, **learner):
    """One step: the update, and log-probs before and after it."""
    rank, batch = start_rank(make_config(folder, learner=learner), folder), make_batch(8)
    before = rank.score(batch).logp
    update = rank.update(batch, llds_lambda=0.2, answer_beta=1.0, lr_scale=1.0)
    after = rank.score(batch).logp
    return SimpleNamespace(update=update, before=before, after=after)


@pytest.mark.parametrize("how", [{"packing": "padded"}, {"packing": "packed"}, {"lora": {"rank": 4}}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_a_step_or_is_refused_by_the_key_that_helps(tmp_path, family, how):
    values, unpacked = FAMILIES[family]
    folder = made(family, values, tmp_path)
    if "lora" in how and family in EXPERTS:
        with pytest.raises(UserError, match=r"learner\.lora\.targets=all-linear: .*q_proj,k_proj") as e:
            step(folder, **how)
        assert "\n" not in str(e.value)
        how = {"lora": {"rank": 4, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}}
    if unpacked and how.get("packing") == "packed":
        with pytest.raises(UserError, match=rf"learner\.packing=packed: .*{unpacked}.*packing=padded") as e:
            step(folder, **how)
        assert "\n" not in str(e.value)
        return
    done = step(folder, **how)
    assert done.update.steps and not any(s.skipped for s in done.update.steps)
    assert np.isfinite(done.after).all() and np.abs(done.after - done.before).max() > 1e-4


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_policy_would_be_another_is_refused_in_one_line(tmp_path, family):
    values, line = REFUSED[family]
    with pytest.raises(UserError, match=rf"^model\.path: {family}ForCausalLM {line}") as e:
        step(made(family, values, tmp_path), packing="padded")
    assert "\n" not in str(e.value)


def test_the_page_of_models_names_each_family_with_what_holds_of_it():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {
        name: row
        for row in page.splitlines()
        if row.startswith("| ")
        for name in re.findall(r"`(\w+)ForCausalLM`", row)
    }
    assert set(rows) == {name.strip() for name in FAMILIES | REFUSED}
    for name, row in rows.items():
        assert ("| refused" in row) == (name in REFUSED), row
        unpacked = any(why for family, (_, why) in FAMILIES.items() if family.strip() == name)
        assert ("`learner.packing: padded`" in row) == unpacked, row
