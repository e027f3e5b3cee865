"""docs/algorithms.md and the docstrings say what is."""

import doctest
import importlib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from trainer.config.algorithm import AlgorithmSettings

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")


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
    assert {"lambda", "gspo", "snapshot", "sequence_mask", "penalty"} <= _names(AlgorithmSettings)
    assert _names(AlgorithmSettings) - code == set()


@pytest.mark.parametrize("module", ["advantages", "overlong"])
def test_examples_in_docstrings_print_what_they_say(module):
    failed, tried = doctest.testmod(importlib.import_module(f"trainer.algorithms.{module}"))
    assert tried > 0 and failed == 0
