"""The doctor on what shows only in a run: rows that lack a column, rewards that block their event loop, and
objects that are never closed."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.common.errors import UserError
from services.contracts import Question
from trainer.commands.checks import doctor_reward
from trainer.commands.checks.crowd import Crowd
from trainer.commands.checks.doctor_calls import check_tool
from trainer.commands.checks.doctor_reward import check_reward
from trainer.commands.checks.doctor_rows import uneven_rows
from trainer.config.schema import parse_config
from trainer.rewards import _UsersReward, final_answer

QUESTION = Question("q", "In which country is Rome?", ("Italy",), "made")


def config(tmp_path, rows, held_out=None, **reward):
    files = {"train": rows} | ({"eval": held_out} if held_out else {})
    data = {}
    for name, of_file in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
        data[name] = str(tmp_path / f"{name}.jsonl")
    raw = {"model": {"path": "m"}, "data": data, "retriever": {"corpus": "c"}, "reward": reward}
    return parse_config(raw)


def row(number, **columns):
    return {"id": f"q{number}", "question": f"who built ship {number}?", "golden_answers": ["Ann"], **columns}


def leveled(trajectory):
    right = final_answer(trajectory) in trajectory.question.golden_answers
    return float(right) * trajectory.question.columns["level"]


def of_extra_info(trajectory):
    right = final_answer(trajectory) in trajectory.question.golden_answers
    return float(right) + 0 * trajectory.question.columns["extra_info"]["index"]


@pytest.mark.parametrize("held_out", [False, True])
def test_a_row_that_lacks_the_column_of_others_is_found_before_it_is_drawn(tmp_path, held_out):
    rows = [row(n, level=1) for n in range(4)]
    lacking = row(9)
    settings = config(tmp_path, rows, [lacking]) if held_out else config(tmp_path, [*rows, lacking])
    found = check_reward(settings, _UsersReward("mine:leveled", leveled))
    assert found.level == "bad"
    assert "question q9 has no other column `level`" in found.advice
    assert found.advice.endswith(
        "a run ends when that row is drawn (of 5 questions that were looked at `level` in 4): fill the "
        "column, or read it by `question.columns.get(name)`"
    )


def test_a_row_is_found_behind_others_that_lack_another_column(tmp_path):
    settings = config(tmp_path, [*(row(n, level=1) for n in range(4)), row(9, other=1)])
    found = check_reward(settings, _UsersReward("mine:leveled", leveled))
    assert found.level == "bad" and "question q9 has no other column `level`" in found.advice


def test_a_key_within_a_column_counts_as_one(tmp_path):
    rows = [row(0, extra_info={"index": 3}), row(1, extra_info={"split": "train"})]
    settings = config(tmp_path, rows)
    assert [one.lacking for one in uneven_rows(settings)] == [("extra_info.split",), ("extra_info.index",)]
    found = check_reward(settings, _UsersReward("mine:of_extra_info", of_extra_info))
    assert found.level == "bad" and "KeyError: 'index'" in found.advice
    turned = config(tmp_path, [rows[0], row(1, extra_info={"index": 4, "split": "train"})])
    found = check_reward(turned, _UsersReward("mine:of_extra_info", of_extra_info))
    assert found.level == "good", "what the first question lacks is not read"


def test_rows_alike_and_a_reward_that_asks_carefully_are_no_matter(tmp_path):
    assert uneven_rows(config(tmp_path, [row(n, level=n) for n in range(3)])) == []
    careful = lambda t: float("Ann" in t.model_text) * t.question.columns.get("level", 1)  # noqa: E731
    uneven = config(tmp_path, [row(0, level=1), row(1)])
    assert check_reward(uneven, _UsersReward("mine:careful", careful)).level == "good"


def test_an_async_reward_that_blocks_its_loop_is_told_so(tmp_path, monkeypatch):
    """By the doctor's own clock, which its calls put forward."""
    now = [0.0]
    monkeypatch.setattr(doctor_reward.time, "monotonic", lambda: now[0])

    async def blocks(trajectory):
        now[0] += 2.0
        return float("Ann" in trajectory.model_text)

    settings = config(tmp_path, [row(0)], concurrency=32)
    many = Crowd.of(settings, 1).trajectories
    found = check_reward(settings, _UsersReward("mine:blocks", blocks))
    assert found.advice == (
        f"a call took 2 s, so those of the {many} trajectories of a step take {2 * many} s; it blocks its "
        "event loop, and all other calls with it: await what it waits for"
    )


def test_an_async_reward_that_waits_is_not_taken_for_one_that_blocks(tmp_path):
    async def waits(trajectory):
        await asyncio.sleep(0.3)
        return float("Ann" in trajectory.model_text)

    found = check_reward(config(tmp_path, [row(0)], concurrency=32), _UsersReward("mine:waits", waits))
    assert "blocks" not in found.advice


class WithAclose:
    def __init__(self, question):
        pass

    def __call__(self, content):
        return "a text"

    async def aclose(self):
        pass


class Misspelt(WithAclose):
    aclose = None

    def clsoe(self):
        pass


class Manager(Misspelt):
    clsoe = None

    def __exit__(self, *error):
        pass


class Closed(WithAclose):
    def close(self):
        pass


@pytest.mark.parametrize(
    ("tool", "name"), [(WithAclose, "aclose"), (Misspelt, "clsoe"), (Manager, "__exit__")]
)
def test_what_stands_where_close_is_looked_for_is_told(tool, name):
    found = check_tool("rollout.tools.box", "mine:Box", tool, QUESTION)
    assert found.level == "note"
    assert found.advice == (
        f"`{name}` is never called: when a trajectory has ended a run calls `close`, plain or async"
    )


@pytest.mark.parametrize("tool", [Closed, lambda content, question: "a text"])
def test_what_is_closed_or_needs_no_close_is_good(tool):
    assert check_tool("rollout.tools.box", "mine:Box", tool, QUESTION).level == "good"


def test_what_returns_another_form_is_told_with_its_place():
    found = check_tool("rollout.tools.box", "mine:box", lambda content, question: {"a": 1}, QUESTION)
    assert found.level == "bad" and "returned a dict; expected a text (" in found.advice
    assert __file__ in found.advice
    with pytest.raises(
        UserError, match=r"returned a dict; expected a number or None \(.*test_doctor_rows.py"
    ):
        _UsersReward("mine:told", lambda trajectory: {"a": 1})(
            doctor_reward.made(QUESTION, config_reading())[0]
        )


def config_reading():
    raw = {"model": {"path": "m"}, "data": {"train": "n"}, "retriever": {"corpus": "c"}}
    return parse_config(raw).rollout.reading
