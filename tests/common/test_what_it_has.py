"""A user's code that asks an object of ours for what it has not: the line says what there is."""

import re

import pytest
from places import ROOT

from retriever_service.answer import Hit
from services.common.errors import UserError
from services.common.loading.user_code import calling
from services.common.loading.what_it_has import MEANT
from services.contracts import Action, Observation, Question, Trajectory
from services.rollout.worker.templates.base import TagTemplate
from services.settings import RolloutSettings

QUESTION = Question("q", "In which country is Rome?", ("Italy",), "own")
SEARCH = Action([1], [-1.0], 0, "search", "<search> Rome </search>")
TRAJECTORY = Trajectory("t", "g", QUESTION, [1], [SEARCH, Observation([2], "x")], "answer")
HIT = Hit("d", "Rome\nA town.", 1.0)
OF_QUESTION = "id, text, golden_answers, data_source, prompt, system, context, columns"
OF_HIT = "id, contents, score"


def imports():
    from services.contracts import Trajectry  # noqa: F401


def of_module():
    import services.contracts

    return services.contracts.Trajectry


def said(call):
    with pytest.raises(UserError) as e, calling("here"):
        call()
    return str(e.value).removeprefix("here: ").rpartition(" (")[0]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: QUESTION.question,
            f"AttributeError: Question has no `question`; it has: {OF_QUESTION}; did you mean text?",
        ),
        (
            lambda: HIT.title,
            f"AttributeError: Hit has no `title`; it has: {OF_HIT}; did you mean contents, whose first line "
            "is the title?",
        ),
        (lambda: HIT.colour, f"AttributeError: Hit has no `colour`; it has: {OF_HIT}"),
        (
            lambda: [segment.query for segment in TRAJECTORY.segments],
            "AttributeError: Observation has no `query`; it has: token_ids, text; did you mean "
            "trajectory.actions, which holds no observations?",
        ),
        (
            lambda: RolloutSettings().max_obs,
            "AttributeError: RolloutSettings has no `max_obs`; did you mean max_obs_tokens?",
        ),
        (
            lambda: TRAJECTORY["answer"],
            "TypeError: 'Trajectory' object is not subscriptable; what it has are attributes, such as "
            "`trajectory.model_text`",
        ),
        (
            lambda: len(HIT),
            "TypeError: object of type 'Hit' has no len(); what it has are attributes, such as "
            "`hit.contents`",
        ),
        (lambda: "x".foo, "AttributeError: 'str' object has no attribute 'foo'"),
        (lambda: setattr(QUESTION, "text", "x"), "FrozenInstanceError: cannot assign to field 'text'"),
    ],
)
def test_the_line_says_what_there_is(call, line):
    assert said(call) == line


@pytest.mark.parametrize("wanted", ["search_count", "num_searches", "searchs"])
def test_a_name_is_found_by_a_word_of_it(wanted):
    line = said(lambda: getattr(TRAJECTORY, wanted))
    assert line.startswith(f"AttributeError: Trajectory has no `{wanted}`; it has: uid, group, question, ")
    assert line.endswith(", actions, model_text, searches, policy_version, arrays; did you mean searches?")


@pytest.mark.parametrize("call", [imports, of_module])
def test_a_name_of_a_module_of_ours_is_answered_too(call):
    line = said(call)
    assert "Error: services.contracts has no `Trajectry`; it has: " in line
    assert line.endswith("; did you mean Trajectory?")


def test_a_class_of_the_users_is_answered_with_what_ours_gives_it():
    class Own(TagTemplate):
        def __init__(self):
            self.tools = ()

    line = said(lambda: Own().encod("x"))
    assert line.startswith("AttributeError: Own has no `encod`; it has: tools, ")
    assert line.endswith("; did you mean encode?")


def test_every_name_from_elsewhere_is_none_of_ours():
    ours = {cls.__name__: cls for cls in (Trajectory, Question, Action, Observation, Hit)}
    assert set(MEANT) == set(ours)
    for name, meant in MEANT.items():
        has = {*ours[name].__dataclass_fields__, *vars(ours[name])}
        assert has.isdisjoint(meant)


def test_a_function_that_takes_other_arguments_is_told_with_its_place():
    class Own:
        def documents(self):
            return ""

    with pytest.raises(UserError) as e, calling("here"):
        Holder(Own().documents).call()
    where = f"{__file__}, line "
    assert f"documents() takes 1 positional argument but 2 were given ({where}" in str(e.value)


class Holder:
    def __init__(self, method):
        self.method = method

    def call(self):
        return self.method("x")


def test_the_line_of_the_page_is_the_one_that_is_printed():
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"on trajectory doctor-right: (AttributeError: .+) \(/home/me", page)
    assert said(lambda: TRAJECTORY.search_count) == shown
