"""docs/extend.md, "What your functions are given": a row for each field, property and method of the records
that parts get, with its type, and for each member of a template."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
from places import ROOT

from retriever_service.answer import Hit
from services.contracts import Action, Observation, Question, Trajectory
from services.rollout.worker.templates import users
from services.rollout.worker.templates.base import TagTemplate, Template

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
PARTS = (
    "A reward",
    "A template",
    "A tool",
    "An environment",
    "A retriever",
    "A policy loss",
    "A metric",
)


def rows_under(heading: str) -> list[list[str]]:
    """The cells of all tables under a heading, without their heads."""
    (section,) = re.findall(rf"^###? {heading}\n(.+?)(?=^##|\Z)", PAGE, re.M | re.S)
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def members_of(cls: type) -> dict[str, str]:
    """Type of each public field, property and method, by its name as the page writes it."""
    found = {field.name: str(field.type) for field in fields(cls) if not field.name.startswith("_")}
    for name, value in vars(cls).items():
        if name.startswith("_") or name in found:
            continue
        if isinstance(value, property):
            found[name] = value.fget.__annotations__["return"]
        elif inspect.isfunction(value):
            found[f"{name}()"] = value.__annotations__["return"]
    return {name: kind.replace(" | ", " or ") for name, kind in found.items()}


@pytest.mark.parametrize("cls", [Trajectory, Action, Observation, Question, Hit])
def test_a_row_stands_for_each_name_of_a_record_with_its_type(cls):
    rows = rows_under(cls.__name__)
    assert {name.strip("`"): kind.strip("`") for name, kind, _ in rows} == members_of(cls)
    assert all(meaning for _, _, meaning in rows)


def test_a_row_stands_for_each_member_of_a_template():
    rows = {re.match(r"`(\w+)", name)[1]: (needed, given) for name, needed, given in whole()}
    source = inspect.getsource(users.UsersTemplate)
    checked = set(re.findall(r'^ {12}"(\w+)": ', source, re.M))
    required = {n for n in (*vars(Template), *Template.__annotations__) if not n.startswith("_")}
    assert {name for name, (needed, _) in rows.items() if needed == "yes"} == required
    named = set(re.findall(r"`(\w+)`", Template.__doc__)) - {"TagTemplate", "ToolCallTemplate", "innermost"}
    assert set(rows) == checked | required | {n for n in named if n.islower()} - {"search", "answer"}


def whole() -> list[list[str]]:
    return [row for row in rows_under("Template") if len(row) == 3]


def test_the_arguments_of_a_templates_methods_are_as_many_as_the_page_names():
    for name, _, _ in whole():
        method, given = re.match(r"`(\w+)(?:\((.*)\))?`", name).groups()
        if given is not None and hasattr(TagTemplate, method):
            taken = list(inspect.signature(getattr(TagTemplate, method)).parameters)[1:]
            assert given.split(", ") == taken or (given, taken) == ("", []), name


def test_the_sections_of_the_seven_parts_lead_to_the_reference():
    for part in PARTS:
        (section,) = re.findall(rf"^## {part}\n(.+?)(?=^## |\Z)", PAGE, re.M | re.S)
        links = re.findall(r"\(#([\w-]+)\)", section)
        expected = ("what-your-functions-are-given", "trajectory", "question", "template")
        assert set(links) & set(expected), part
