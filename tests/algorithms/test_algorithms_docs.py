"""docs/algorithms.md and the docstrings say what is."""

import doctest
import importlib
import json
import re
from typing import get_args

import pytest
from places import DATA, ROOT
from pydantic import BaseModel

from trainer.algorithm_names import AdvantageKind, PolicyLossKind
from trainer.config.algorithm import AlgorithmSettings
from trainer.config.schema import RewardSettings
from trainer.rewards import _KNOWN as KNOWN
from trainer.rewards import ACCEPTED

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def _names(model: type[BaseModel]) -> set[str]:
    """Every setting of a section and its sections, and every value that it accepts by name."""
    out = set()
    for name, field in model.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        out |= _names(field.annotation) if nested else {field.alias or name}
        out |= {v for v in get_args(field.annotation) if isinstance(v, str)}
    return out


def test_the_page_explains_every_setting_and_value_of_the_algorithm_section():
    code = {
        word
        for part in PAGE.split("`")[1::2]
        for word in part.replace("=", " ").replace(":", " ").replace(".", " ").split()
    }
    names = _names(AlgorithmSettings) | set(get_args(PolicyLossKind))  # `loss` takes import paths too
    assert {"lambda", "gspo", "snapshot", "sequence_mask", "penalty"} <= names
    assert names - code == set()


def test_the_table_of_policy_losses_has_a_row_for_each_loss():
    section = PAGE.split("## Policy losses", 1)[1].split("\n## ", 1)[0]
    header = "| value | maximised for each action token | divided by | source |\n| --- | --- | --- | --- |\n"
    rows = section.split(header, 1)[1].split("\n\n", 1)[0].splitlines()
    assert [row.split("|")[1].strip(" `") for row in rows] == list(get_args(PolicyLossKind))
    assert all(cell.strip() for row in rows for cell in row.split("|")[1:5])


def test_every_reward_has_a_row_and_stands_in_the_description_of_its_key():
    table = PAGE.split("## Scoring", 1)[1].split("| --- | --- | --- |\n", 1)[1].split("\n\n", 1)[0]
    assert {row.split("|")[1].strip(" `") for row in table.splitlines()} == set(KNOWN)
    description = RewardSettings.model_fields["kind"].description
    assert [kind for kind in KNOWN if f"`{kind}`" not in description] == []
    assert ACCEPTED.startswith(f"accepted are {', '.join(KNOWN)}, or an import path ")


def test_the_golden_values_are_of_the_losses_that_the_page_names():
    file = DATA / "golden.json"
    golden = json.loads(file.read_text(encoding="utf-8"))
    named = re.search(r"holds exact values of the advantages, the policy losses (.+?), LLDS and", PAGE)
    assert named is not None
    listed = set(re.findall(r"`(\w+)`", named[1]))
    assert listed <= set(get_args(PolicyLossKind))
    for case in golden["cases"]:
        assert {key.removesuffix("+iw").removesuffix("_tight") for key in case["policy"]} == listed
        assert case["advantages"].keys() == set(get_args(AdvantageKind)) and case["llds"] and case["kl_k3"]
    for page in re.findall(r"[\w/]+\.md", golden["about"]):
        assert (ROOT / page).is_file(), page


@pytest.mark.parametrize("module", ["advantages", "overlong"])
def test_examples_in_docstrings_print_what_they_say(module):
    failed, tried = doctest.testmod(importlib.import_module(f"trainer.algorithms.{module}"))
    assert tried > 0 and failed == 0
