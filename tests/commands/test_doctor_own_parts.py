"""The doctor on parts of one's own: which `right_at` counts, rewards of what an environment said, tools that
always raise, `close`, and turns of another form."""

from __future__ import annotations

import threading

import pytest
from examples.extend.environment import Guessing
from examples.extend.reward import frugal
from rollout_fakes import chat_bpe

from services.common.errors import UserError
from services.contracts import Observation, Question
from services.rollout.worker.plain_text import Outside
from services.rollout.worker.templates import make_template
from services.rollout.worker.templates.search_r1 import SearchR1Template, in_chat
from services.settings import RolloutSettings
from trainer.commands.checks import doctor_calls
from trainer.commands.checks.doctor_reward import check_reward
from trainer.commands.checks.doctor_said import after_tools
from trainer.commands.init import PART_MARKS
from trainer.config.schema import parse_config
from trainer.rewards import make_reward, overrides, right_at

QUESTION = Question("q", "In which country is Rome?", ("Italy",), "made")
FRUGAL = "examples.extend.reward:frugal"


def config(**changes):
    raw = {"model": {"path": "m"}, "data": {"train": "nowhere.jsonl"}, "retriever": {"corpus": "c"}}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        raw.setdefault(section, {})[name] = value
    return parse_config(raw)


def test_the_setting_counts_before_the_function_and_both_are_named():
    reward = make_reward(FRUGAL)
    assert (right_at(reward, 0.8), right_at(reward, None), frugal.right_at) == (0.8, 0.5, 0.5)
    found = check_reward(config(reward__kind=FRUGAL, reward__right_at=0.8), reward)
    assert found.level == "note"
    assert found.seen.endswith("none earns 0; right is from 0.8 on (reward.right_at)")
    assert found.advice == (
        "reward.right_at=0.8 is set, and counts in place of 0.5, the attribute right_at of the reward "
        "function: take the setting out if the function is to say it"
    )
    found = check_reward(config(reward__kind=FRUGAL), reward)
    assert (found.level, found.advice) == ("good", "") and "reward.right_at" not in found.seen


@pytest.mark.parametrize("setting", [None, 0.5])
def test_a_setting_that_says_the_same_or_nothing_is_not_told(setting):
    assert overrides(make_reward(FRUGAL), setting) == ""
    assert overrides(make_reward("em"), 0.8) == "", "those that come with Unspiral say nothing themselves"


def test_a_right_answer_below_the_setting_is_told_to_lower_it():
    def half(trajectory):
        return 0.7 if "Italy" in trajectory.model_text else 0.0

    half.right_at = 0.7
    found = check_reward(config(reward__kind="mine:half", reward__right_at=0.8), half)
    assert (
        "right from 0.8 on, for metrics and LLDS; where yours earn less, lower reward.right_at"
        in found.advice
    )


def test_init_says_that_its_threshold_is_of_its_kind():
    assert PART_MARKS[1].startswith("  kind: format")
    assert PART_MARKS[2].startswith("  right_at: 0.8") and PART_MARKS[2].endswith("With another kind: delete")


def solved(trajectory):
    said = [s.text for s in trajectory.segments if isinstance(s, Observation)]
    return float(any("right" in text.split() for text in said))


GUESS = {"guess": "examples.extend.environment:Guessing"}


def test_a_reward_of_what_an_environment_said_is_shown_it():
    given = config(reward__kind="mine:solved", rollout__tools=GUESS)
    found = check_reward(given, solved, after_tools)
    assert found.seen == (
        "mine:solved: a right answer earns 0, a wrong one earns 0, none earns 0; after <guess> a right one "
        "earns 1, a wrong one earns 0"
    )
    assert (found.level, found.advice) == ("good", "")


def test_one_that_no_call_changes_is_noted_all_the_same():
    given = config(reward__kind="mine:same", rollout__tools=GUESS)
    found = check_reward(given, lambda trajectory: 0.0, after_tools)
    assert found.level == "note" and found.advice.startswith("all three earn the same")
    assert found.advice.endswith(
        "calls of the tools changed nothing: a reward that reads what they say may need others"
    )


def test_a_tool_that_fails_takes_no_part_and_one_that_is_not_needed_is_not_called():
    tools = {"calc": "examples.extend.tool:calculator", "gone": "examples.extend.tool:nothing"}
    pairs = after_tools(config(rollout__tools=tools), QUESTION)
    assert list(pairs) == ["calc"] and [t.uid for t in pairs["calc"]] == [
        "doctor-calc-right",
        "doctor-calc-wrong",
    ]

    def never(config, question):
        raise AssertionError("em tells them apart by itself")

    assert check_reward(config(), make_reward("em"), never).level == "good"


async def holds_the_loop(content, question):
    HELD.wait(60)
    return "held"


async def answers(content, question):
    return "answered"


HELD = threading.Event()


def test_a_tool_that_holds_the_loop_takes_no_other_with_it():
    tools = {name: f"{__name__}:{name}" for name in ("holds_the_loop", "answers")}
    try:
        pairs = after_tools(config(rollout__tools=tools, rollout__tool_timeout_seconds=0.05), QUESTION)
    finally:
        HELD.set()
    assert list(pairs) == ["answers"]


def keyless(content, question):
    raise KeyError("SEARCH_KEY")


class Keyless(Guessing):
    def __call__(self, content):
        raise KeyError("SEARCH_KEY")


@pytest.mark.parametrize("tool", [keyless, Keyless])
def test_a_tool_that_raises_for_all_texts_is_bad(tool):
    found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", tool, QUESTION)
    assert found.level == "bad"
    assert found.advice.startswith("rollout.tools.t: on question q: KeyError: 'SEARCH_KEY' (")
    assert found.advice.endswith(
        "; it raised for all 6 texts that were tried, so a run ends at its first call: mend that; where "
        "a policy's text is wrong, return a text"
    )


def test_a_tool_that_answers_some_texts_is_noted_with_one_of_these():
    def sums(content, question):
        return str(eval(content, {}))

    found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", sums, QUESTION)
    assert (found.level, found.seen) == ("note", "mine:tool: '5' for '5'")
    assert "SyntaxError" in found.advice and "a policy writes anything" in found.advice


def test_a_tool_that_returns_a_dict_is_told_by_pythons_name():
    for returned, kind in (({"a": 1}, "a dict"), (None, "nothing"), ([1], "a list")):
        found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", lambda c, q, r=returned: r, QUESTION)
        says = f"rollout.tools.t: returned {kind}; expected a text ({__file__}, line "
        assert found.level == "bad" and found.advice.startswith(says)
    found = doctor_calls.check_search(
        "retriever.index", "mine:search", lambda q, k: [{"text": "a"}], QUESTION, 3
    )
    assert found.advice.endswith("its passage 0 is a dict")


class Leaves(Guessing):
    def close(self):
        raise OSError("no such session")


def test_an_environment_whose_close_fails_is_bad():
    found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", Leaves, QUESTION)
    assert found.level == "bad" and found.seen == "mine:tool: 'wrong 1' for 'In which country is Rome?'"
    assert found.advice.startswith("rollout.tools.t: close, after question q: OSError: no such session (")


TURNS = 'turns, each a role and a list of texts: [("system", [SYSTEM]), ("user", [Outside(question.text)])]'


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([{"role": "user", "content": "who?"}], "turn 0 is a dict with role, content"),
        (
            [("system", ["x"]), ("user", Outside("who?"))],
            "of turn 1, user, the second part is Outside: put [ ] around it",
        ),
        ([("user", "who?")], "of turn 0, user, the second part is text: put [ ] around it"),
        ([("user", [None])], "of turn 0, user, a piece is nothing"),
        ([("user",)], "turn 0 is a tuple"),
        ("who?", "found text"),
    ],
)
def test_turns_of_another_form_are_refused_with_the_form(turns, says):
    with pytest.raises(TypeError) as error:
        in_chat(chat_bpe(), turns)
    assert str(error.value) == f"in_chat: expected {TURNS}; {says}"


class Messages(SearchR1Template):
    def prompt_ids(self, question):
        return self.encode(*in_chat(self.tokenizer, [{"role": "user", "content": question.text}]))


def test_the_line_of_a_template_names_its_own_place():
    template = make_template("test_doctor_own_parts:Messages", chat_bpe(), RolloutSettings())
    with pytest.raises(
        UserError, match=r"TypeError: in_chat: expected turns, .*test_doctor_own_parts.py, line \d+\)"
    ):
        template.prompt_ids(QUESTION)
