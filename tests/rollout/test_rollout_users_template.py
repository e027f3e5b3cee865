"""A template of the user's own that raises, ends the program or returns another form: one line with key,
method and place, in the doctor's trial as in a rollout."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_fakes import Hit, ScriptedEngine, chat_bpe, request, words

from services.common.errors import UserError
from services.contracts import Observation, Question
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.plain_text import Outside, control_tokens
from services.rollout.worker.templates import make_template
from services.rollout.worker.templates.base import ParsedAction, TagTemplate
from services.settings import RolloutSettings
from trainer.commands.checks import doctor_calls
from trainer.config.schema import parse_config
from trainer.session.preflight.template_trial import try_template, unread_answer, untold

QUESTION = Question("q1", "where is n1 ?", ("n21",), "made")


class Good(TagTemplate):
    head, tail, invalid = " <information> ", " </information> ", " <search> "

    def prompt_ids(self, question):
        return self.encode("<search> <answer> ", Outside(question.text))

    def documents(self, hits):
        return " ".join(hit.contents for hit in hits)


class Misspelt(Good):
    def prompt_ids(self, question):
        return self.encode(question.txt)


class Text(Good):
    def prompt_ids(self, question):
        return question.text


class Beyond(Good):
    def prompt_ids(self, question):
        return [1, 10**6]


class Empty(Good):
    def prompt_ids(self, question):
        return []


class Floats(Good):
    def prompt_ids(self, question):
        return [1, 2.0]


class Listed(Good):
    def documents(self, hits):
        return [hit.contents for hit in hits]


class First(Good):
    def documents(self, hits):
        return hits[0].contents


class Ending(Good):
    def documents(self, hits):
        sys.exit(3)


class Undecoded(Good):
    def decode(self, token_ids):
        return [self.encode("x"), 1 / len(token_ids)]


class Pair(Good):
    def parse(self, text):
        return "search", text


class OtherKind(Good):
    def parse(self, text):
        return ParsedAction("lookup", text)


class OtherTool(Good):
    def parse(self, text):
        return ParsedAction("tool", text, "calc")


class Notice(Good):
    def notice(self):
        return self.invalid


class Decoded(Good):
    def decode(self, token_ids):
        return token_ids


class Headless(Good):
    head = None


class Letters(Good):
    stop = "</search>"


class Unmade(Good):
    def __init__(self, tokenizer, settings):
        self.tokenizer = tokenizer


class EndingAtOnce(Good):
    def __init__(self, tokenizer, settings):
        sys.exit()


class Deaf(Good):
    stop = ()

    def __init__(self, tokenizer, settings):
        super().__init__(tokenizer, settings)
        self.stop = ()


class Attribute(Good):
    notice = " no "


def line_of(name, text):
    """The place of a line of this file."""
    lines = Path(__file__).read_text().splitlines()
    first = lines.index(f"class {name}(Good):")
    number = next(n for n, line in enumerate(lines[first:], first + 1) if text in line)
    return rf" \({re.escape(__file__)}, line {number}\)$"


IDS = r"expected a list of token ids, 0 to \d+$"
READ = "parse of '<search> Rome </search>': returned"
MISTAKES = {
    "Misspelt": "prompt_ids of question q1: AttributeError: .*" + line_of("Misspelt", "txt"),
    "Text": f"prompt_ids of question q1: returned text; {IDS}",
    "Beyond": f"prompt_ids of question q1: returned the id 1000000; {IDS}",
    "Empty": f"prompt_ids of question q1: returned an empty list; {IDS}",
    "Floats": f"prompt_ids of question q1: returned a list whose item 1 is a number; {IDS}",
    "Listed": r"observation_ids: TypeError: `documents` returned a list; expected a text$",
    "First": "observation_ids with no passages: IndexError: list index out of range"
    + line_of("First", "hits[0]"),
    "Ending": r"observation_ids: it ends the program, by SystemExit\(3\)" + line_of("Ending", "exit(3)"),
    "Pair": READ + r" a tuple; expected a ParsedAction\(kind, content\)$",
    "OtherKind": READ + " an action of kind 'lookup'; expected search, answer, tool, invalid$",
    "OtherTool": READ + " a call of the tool 'calc'; rollout.tools has none$",
    "Notice": r"notice: returned text; expected an Observation\(token_ids, text\)$",
    "Decoded": "decode: returned a list; expected a text$",
    "Headless": "cannot be made .*: TypeError: its `head` is nothing; expected a text$",
    "Letters": "stop: expected a tuple of texts, found text: put a comma after it$",
    "Unmade": "lacks min_observation_tokens; its __init__ must call super.*tokenizer, settings.$",
    "EndingAtOnce": r"cannot be made .*: it ends the program, by SystemExit\(\)"
    + line_of("EndingAtOnce", "exit"),
    "Deaf": r"stop: expected a tuple of texts that end an action, found \(\)$",
    "Attribute": "notice: expected a method, found text$",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_template_is_one_line(name):
    settings = RolloutSettings(template=f"{__name__}:{name}")
    says = re.sub(r"\$$", r"(?: \\(.*, line \\d+\\))?$", MISTAKES[name])
    with pytest.raises(UserError, match=f"^rollout.template={__name__}:{name}: {says}"):
        try_template(make_template(settings.template, words(), settings), settings, QUESTION)


class Brim(Good):
    def prompt_ids(self, question):
        return self.encode("where <search> <answer>")

    def observation_ids(self, hits, budget):
        return super().observation_ids(hits, budget * 2)


class Unread(Good):
    def documents(self, hits):
        return "n1"


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("Good", []),
        ("Unread", ["an observation of a passage of Rome holds no Rome"]),
        (
            "Brim",
            [
                "the prompt of another question is the same: 'where <search> <answer>'",
                "an observation of a long passage has 48 tokens, more than rollout.max_obs_tokens=24",
            ],
        ),
    ],
)
def test_what_is_most_likely_meant_otherwise_is_noted(name, notes):
    settings = RolloutSettings(template=f"{__name__}:{name}", max_obs_tokens=24)
    assert try_template(make_template(settings.template, words(), settings), settings, QUESTION) == notes


def test_passages_are_spoken_of_where_there_may_be_some():
    settings = RolloutSettings(template=f"{__name__}:Undecoded")
    template = make_template(settings.template, words(), settings)
    with pytest.raises(UserError, match=": decode: ZeroDivisionError: "):
        template.decode([])


class Plain(Good):
    """Text from outside that is not marked."""

    def prompt_ids(self, question):
        return self.encode("<search> <answer>", question.text)

    def observation_ids(self, hits, budget):
        text = " ".join(hit.contents for hit in hits)
        return Observation(self.encode(text)[:budget], text)

    def result_ids(self, text, budget):
        return Observation(self.encode(text)[:budget], text)


class Told(Good):
    def prompt_ids(self, question):
        answers = Outside(" ".join(question.golden_answers))
        return self.encode("<search> <answer> <desk>", Outside(question.text), answers)


class Called(Good):
    def prompt_ids(self, question):
        return self.encode("Write <tool_call> </tool_call> or <think> : ", Outside(question.text))


class Replies(Good):
    """Other tags, as of a model that was trained with them."""

    stop = ("</look>", "</reply>")

    def prompt_ids(self, question):
        return self.encode("write <look> or <reply> : ", Outside(question.text))

    def parse(self, text):
        kinds = {"look": "search", "reply": "answer"}
        found = re.search(r"<(look|reply)>(.*?)</\1>", text)
        return ParsedAction(kinds[found[1]], found[2].strip()) if found else ParsedAction("invalid", "")

    def written(self, kind, thought, content):
        tag = "look" if kind == "search" else "reply"
        return [f"{thought}<{tag}> ", Outside(content), f" </{tag}>"]


def test_answers_that_no_score_reads_are_noted():
    """With em or f1 each of them would earn 0, and nothing else would say so."""
    (note,) = noted("Replies")
    assert note.startswith("<reply> Rome </reply> is an answer to `parse` and none to scores: ")
    assert unread_answer(template_of("Good")) is None


@pytest.mark.parametrize(("kind", "level"), [("em", "bad"), ("f1", "bad"), ("mine:reward", "note")])
def test_the_doctor_refuses_a_reward_that_no_answer_can_earn(monkeypatch, kind, level):
    monkeypatch.setattr(doctor_calls.tokenizer, "load_tokenizer", lambda model: chat_bpe())
    path = f"{__name__}:Replies"
    config = parse_config(
        {
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "run": {"name": "r"},
            "retriever": {"url": "http://x"},
            "reward": {"kind": kind},
            "rollout": {"template": path},
        }
    )
    found = doctor_calls.check_template("rollout.template", path, Path("m"), config, QUESTION)
    assert found.level == level and "<reply> Rome </reply>" in found.advice


def template_of(name, **more):
    tokenizer = chat_bpe()
    settings = RolloutSettings(template=f"{__name__}:{name}", **more)
    return make_template(settings.template, tokenizer, settings)


def noted(name, **more):
    tokenizer = chat_bpe()
    settings = RolloutSettings(template=f"{__name__}:{name}", **more)
    template = make_template(settings.template, tokenizer, settings)
    return try_template(template, settings, QUESTION, control_tokens(tokenizer))


def test_control_tokens_that_come_from_outside_are_noted():
    assert noted("Good") == []
    assert noted("Plain", tools={"desk": "a:b"})[1:] == [
        f"a {what} that holds <eos> puts this control token into the policy's text, and may end the turn: "
        "mark text from outside, self.encode(..., Outside(text))"
        for what in ("question", "passage", "tool's result")
    ]


def test_tags_that_the_prompt_does_not_name_and_golden_answers_are_noted():
    why = (
        ": a policy that was not trained with these tags writes what the prompt tells it; name them in "
        "`prompt_ids`, or in the `prompt` of the questions"
    )
    assert noted("Good", tools={"desk": "a:b"}) == [f"the prompt does not name <desk>{why}"]
    assert noted("Called") == [
        "the prompt does not name <search>, <answer>; it has <tool_call>, which the template does not read"
        + why
    ]
    told = ["the prompt depends on the golden answers, which a policy must not be shown"]
    assert noted("Told", tools={"desk": "a:b"}) == told


def test_a_template_of_ours_does_not_name_the_tools_of_the_user():
    settings = RolloutSettings(tools={"desk": "a:b"})
    template = make_template("search_r1", chat_bpe(), settings)
    (note,) = untold(template, settings, QUESTION)
    assert note.startswith("the prompt does not name <desk>: ")
    named = replace(QUESTION, prompt="Search by <search> , ask by <desk> , end by <answer> : where is n1 ?")
    assert untold(template, settings, named) == []
    assert untold(template, RolloutSettings(), QUESTION) == []


@pytest.mark.parametrize("name", ["Listed", "Ending", "Misspelt"])
def test_a_rollout_ends_with_the_same_line(name):
    settings = RolloutSettings(template=f"{__name__}:{name}")
    tokenizer = words()

    async def search(query):
        return [Hit("d0", "n1 n2")]

    run = run_trajectory(
        request(text=QUESTION.text),
        engine=ScriptedEngine(tokenizer, ["<search> n1 </search>", "<answer> n1 </answer>"]),
        template=make_template(settings.template, tokenizer, settings),
        search=search,
        settings=settings,
    )
    said = MISTAKES[name].replace("question q1", r"question [\w-]+")
    with pytest.raises(UserError, match=f"^rollout.template={__name__}:{name}: {said}"):
        asyncio.run(run)
