"""`doctor` calls a retriever, tools and metrics of the user's own once: another form than a run takes is
found before anything starts."""

import re
import threading
import time
from pathlib import Path

import pytest
from places import ROOT

from retriever_service.search.users_index import EXPECTED, UsersIndex, call_search
from services.common.errors import UserError
from services.common.processes.patience import Patience
from services.contracts import Question
from trainer.commands.checks import doctor_calls
from trainer.commands.checks.doctor import verdict
from trainer.commands.checks.doctor_parts import check_parts
from trainer.commands.checks.findings import Finding
from trainer.config.schema import parse_config
from trainer.loop.records.users_metrics import RUNS_OWN

QUESTION = Question("q", "In which country is Rome?", ("Italy",), "own")


def pairs(query, topk):
    return [("Rome\nA town of Italy.", 1.5), ["Arl\nA river.", 1]][:topk]


def lazy_pairs(query, topk):
    yield "Rome\nA town.", 0.5


def texts(query, topk):
    return ["Rome", "Arl"]


def dicts(query, topk):
    return [{"text": "Rome", "score": 1.0}]


def swapped(query, topk):
    return [(1.0, "Rome")]


def nothing(query, topk):
    return None


def one_text(query, topk):
    return "Rome"


def fails(query, topk):
    raise ConnectionError("no server")


def slow(query, topk):
    time.sleep(60)


def too_many(query, topk):
    return [(f"n{n}\nText.", float(-n)) for n in range(8)]


def worst_first(query, topk):
    return [("Arl\nA river.", 1.0), ("Rome\nA town.", 2.0)]


def searched(function):
    found = doctor_calls.check_search("retriever.index", "mine:search", function, QUESTION, 3)
    return found.level, found.seen, found.advice


def test_a_search_that_returns_passages_with_scores_is_counted():
    assert searched(pairs) == ("good", "mine:search: 2 passages of 'In which country is Rome?'", "")
    assert searched(lazy_pairs)[:2] == ("good", "mine:search: 1 passage of 'In which country is Rome?'")


def test_a_search_that_finds_nothing_or_nothing_readable_is_noted():
    level, seen, advice = searched(lambda query, topk: [])
    assert (level, seen) == ("note", "mine:search: 0 passages of 'In which country is Rome?'")
    assert advice.startswith("none for the first question of the run")
    level, _, advice = searched(lambda query, topk: [(" ", 1.0)])
    assert (level, advice) == ("note", "passage 0 is empty")


@pytest.mark.parametrize("score", ["nan", "inf", "-inf"])
def test_a_score_that_is_no_number_is_refused_wherever_the_function_is_asked(score):
    says = f"retriever.index=mine:search: its passage 0 has the score {score}; expected a finite number"
    assert searched(lambda query, topk: [("Rome", float(score))])[::2] == ("bad", says)
    with pytest.raises(UserError, match=f"passage 1 has the score {score}; expected a finite number"):
        call_search("index m:s", lambda query, topk: [("Rome", 1), ("Arl", float(score))], "q", 2)


def test_a_search_with_another_number_or_order_of_passages_is_noted():
    level, seen, advice = searched(too_many)
    assert (level, seen) == ("note", "mine:search: 8 passages of 'In which country is Rome?'")
    assert advice == "it was asked for 3; a run takes the first 3"
    level, _, advice = searched(worst_first)
    assert level == "note" and advice == (
        "passage 1 has a higher score (2) than the one before it (1); expected best first: the policy reads "
        "them in the order that they come in"
    )
    index = UsersIndex(f"{__name__}:too_many", None)
    assert [score for _, score in index.search(["Rome?"], 3)[0]] == [0.0, -1.0, -2.0]


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (texts, "its passage 0 is text"),
        (dicts, "its passage 0 is a dict"),
        (swapped, "its passage 0 is a tuple of a number, text"),
        (nothing, "it returned nothing"),
        (one_text, "it returned text"),
    ],
)
def test_a_search_of_another_form_is_told_which_one_is_expected(function, got):
    told = f"retriever.index=mine:search: expected {EXPECTED}; {got}"
    assert searched(function) == ("bad", "mine:search", told)
    with pytest.raises(UserError) as refused:  # and so is one that is to be served
        UsersIndex(f"{__name__}:{function.__name__}", None)
    assert str(refused.value) == f"index {__name__}:{function.__name__}: expected {EXPECTED}; {got}"


def test_a_search_that_fails_when_it_is_opened_may_be_early():
    index = UsersIndex(f"{__name__}:fails", None)
    with pytest.raises(UserError, match="ConnectionError: no server"):
        index.search(["Rome?"], 3)


def test_a_search_that_fails_or_lasts_is_told(monkeypatch):
    level, _, advice = searched(fails)
    assert (
        level == "bad" and "ConnectionError: no server (" in advice and "test_doctor_calls.py, line" in advice
    )
    monkeypatch.setattr(doctor_calls, "SECONDS", 0.05)
    level, _, advice = searched(slow)
    assert (level, advice) == ("bad", "retriever.index=mine:search: no result of one call within 0.05 s")


def test_a_call_that_waits_for_a_core_is_waited_for(monkeypatch):
    """The call ends only once its limit has passed by the clock, and by processor time has not."""
    looked, ended = [], threading.Event()

    class Working(Patience):
        def over(self):
            looked.append(self._used)
            if self.passed > self.seconds:
                ended.set()
            return False

    monkeypatch.setattr(doctor_calls, "SECONDS", 0.05)
    monkeypatch.setattr(doctor_calls, "Patience", Working)
    assert doctor_calls.in_time("x", lambda: ended.wait(60)) is True
    assert set(looked) == {time.process_time}


def echo(content, question):
    return f"you wrote {content}"


def number(content, question):
    return 5


def picky(content, question):
    return str(int(content))


class Counting:
    def __init__(self, question):
        self.calls = 0

    def __call__(self, content):
        self.calls += 1
        return f"call {self.calls}"


@pytest.mark.parametrize(
    ("tool", "level", "says"),
    [
        (echo, "good", "mine:tool: 'you wrote In which country is Rome?' for 'In which country is Rome?'"),
        (Counting, "good", "mine:tool: 'call 1' for 'In which country is Rome?'"),
        (number, "bad", "rollout.tools.t: returned a number; expected a text"),
        (picky, "note", "a policy writes anything, and a tool that raises ends the run; return a text"),
    ],
)
def test_a_tool_is_called_with_a_text_that_it_does_not_expect(tool, level, says):
    found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", tool, QUESTION)
    assert found.level == level and says in f"{found.seen} {found.advice}"


def misnamed(content, question):
    return question.answer


def unknown(content, question):
    return contents  # noqa: F821


@pytest.mark.parametrize(
    ("tool", "says"), [(misnamed, "did you mean golden_answers?"), (unknown, "NameError")]
)
def test_a_slip_in_a_tool_is_bad_whatever_a_policy_writes(tool, says):
    found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", tool, QUESTION)
    assert found.level == "bad" and says in found.advice and "a policy writes" not in found.advice


class Unmade(Counting):
    def __init__(self, question):
        self.answers = question.answers


async def blocks(content, question):
    time.sleep(60)


def away(content, question):
    raise TimeoutError("no server")


def test_what_no_text_of_a_policy_mends_is_bad_and_a_service_that_is_away_is_noted():
    found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", Unmade, QUESTION)
    assert found.level == "bad"
    assert found.advice.startswith("rollout.tools.t: made of question q: AttributeError: ")
    found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", away, QUESTION)
    assert (found.level, found.advice) == (
        "note",
        f"rollout.tools.t: on question q: TimeoutError: no server ({__file__}, line "
        f"{away.__code__.co_firstlineno + 1}): a run samples such a trajectory again, and ends at the third "
        "such call",
    )


def test_the_limit_of_the_run_is_kept_and_named_where_the_doctor_waits_longer(monkeypatch):
    limit = doctor_calls.Limit("rollout.tool_timeout_seconds", 0.05)
    for tool in (blocks, lambda content, question: time.sleep(60)):
        found = doctor_calls.check_tool("rollout.tools.t", "mine:tool", tool, QUESTION, limit)
        said = "rollout.tools.t: no result within rollout.tool_timeout_seconds=0.05"
        assert (found.level, found.advice) == ("bad", said)
    assert doctor_calls.late
    monkeypatch.setattr(doctor_calls, "SECONDS", 0.05)
    limit = doctor_calls.Limit("retriever.timeout_seconds", 60)
    found = doctor_calls.check_search("retriever.index", "mine:search", slow, QUESTION, 3, limit)
    assert found.advice.endswith("within 0.05 s (a run waits retriever.timeout_seconds=60)")


def test_a_search_too_slow_for_all_trajectories_at_once_is_noted():
    crowd = doctor_calls.Crowd(trajectories=80, concurrency=2)
    assert crowd.note("retriever", 1.04, 30) == (
        "a call took 1 s: 80 trajectories that search at once wait up to 42 s, and a search is given up "
        "after 30 s; retriever.concurrency (2 now) lets as many calls run at a time"
    )
    assert crowd.note("retriever", 0.7, 30) == ""
    limit = doctor_calls.Limit("retriever.timeout_seconds", 60)

    def takes_a_while(query, topk):
        time.sleep(0.05)
        return pairs(query, topk)

    def found(trajectories):
        crowd = doctor_calls.Crowd(trajectories, 1)
        return doctor_calls.check_search(
            "evaluation.retriever.index", "mine:search", takes_a_while, QUESTION, 3, limit, crowd
        )

    assert found(2).level == "good"
    level, advice = found(10_000).level, found(10_000).advice
    assert level == "note" and "is given up after 30 s; evaluation.retriever.concurrency (1 now)" in advice


def descent(logp, old, advantages, *, clip_low, clip_high):
    return -(logp - old).exp() * advantages


def ascent(logp, old, advantages, *, clip_low, clip_high):
    return (logp - old).exp() * advantages


def flat(logp, old, advantages, *, clip_low, clip_high):
    return logp * 0


def detached(logp, old, advantages, *, clip_low, clip_high):
    return -logp.detach()


def mean(logp, old, advantages, *, clip_low, clip_high):
    return logp.mean()


def roots(logp, old, advantages, *, clip_low, clip_high):
    return logp.sqrt()


@pytest.mark.parametrize(
    ("loss", "level", "advice"),
    [
        (descent, "good", ""),
        (
            ascent,
            "note",
            "tokens of a positive advantage: a step would make them less likely (a loss is made smaller: its "
            "sign?)",
        ),
        (flat, "note", "tokens of a positive advantage: a step would not move them"),
        (
            detached,
            "bad",
            "algorithm.loss=mine:loss: ValueError: returned a loss without a gradient; expected one that is "
            "made of `logp` by torch",
        ),
        (
            mean,
            "bad",
            "algorithm.loss=mine:loss: ValueError: returned (); expected the loss of each token, (2, 3)",
        ),
        (
            roots,
            "bad",
            "algorithm.loss=mine:loss: its loss is nan, of log-probs -0.5 to -2; expected a finite number",
        ),
    ],
)
def test_a_loss_is_called_and_its_gradient_looked_at(loss, level, advice):
    found = doctor_calls.check_loss("algorithm.loss", "mine:loss", loss, parse_config(RAW))
    assert (found.level, found.advice) == (level, advice)


def counts(trajectories, rewards):
    return {"my/count": len(trajectories), "my/right": sum(rewards)}


def listed(trajectories, rewards):
    return [1.0]


def worded(trajectories, rewards):
    return {"my/word": "many"}


def taken(trajectories, rewards):
    return {"my/count": 1.0, "reward/mean": 0.5, "entropy": 1}


@pytest.mark.parametrize(
    ("function", "level", "says"),
    [
        (
            taken,
            "note",
            "reward/mean, entropy: begins as metrics of a run do, which leaves out a name that it uses "
            "itself; give another, such as my/name",
        ),
        (counts, "good", "mine:metric: my/count, my/right"),
        (listed, "bad", "TypeError: returned a list; expected numbers by name, such as {'my/queries': 1.0}"),
        (lambda trajectories, rewards: {1: 1.0}, "bad", "1: left out: expected a name, got a number; expect"),
        (lambda trajectories, rewards: (1.0,), "bad", "TypeError: returned a tuple; expected numbers by"),
        (
            lambda trajectories, rewards: {},
            "note",
            "mine:metric: no number for a right, a wrong, no answer, and a right one after a search as it "
            "should be where it counts calls of tools",
        ),
        (worded, "bad", "my/word: left out: expected a number, got 'many'; expected numbers by name"),
    ],
)
def test_metrics_are_made_of_trajectories(function, level, says):
    config = parse_config(RAW)
    found = doctor_calls.check_metrics("trainer.metrics", "mine:metric", function, config, QUESTION)
    assert found.level == level and says in f"{found.seen} {found.advice}"


def test_the_first_words_of_all_documented_metrics_are_the_runs_own():
    rows = [line for line in (ROOT / "docs/metrics.md").read_text().splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])}
    assert len(names) > 90 and {name.partition("/")[0] for name in names} <= RUNS_OWN


def test_the_last_line_names_each_part_once():
    bad = [Finding("trainer.metrics", "bad", one) for one in "abc"] + [Finding("reward.kind", "bad", "x")]
    assert verdict(bad) == "not ready: see trainer.metrics, reward.kind above"


RAW = {"model": {"path": "nowhere"}, "data": {"train": "nowhere.jsonl"}, "retriever": {"corpus": "c.jsonl"}}


def test_the_parts_of_a_configuration_are_called():
    own = {
        "retriever": {"index": f"{__name__}:texts"},
        "rollout": {"tools": {"t": f"{__name__}:number"}},
        "trainer": {"metrics": [f"{__name__}:counts"]},
    }
    found = {found.what: found for found in check_parts(parse_config(RAW | own))}
    for key in ("retriever.index", "rollout.tools.t"):
        assert found[key].level == "bad"
        assert re.search(rf"\({re.escape(__file__)}, line \d+\)$", found[key].advice), "where it is defined"
    assert found["trainer.metrics"].level == "good"


def test_what_is_imported_for_a_trial_is_none_of_its_time(monkeypatch):
    """The first import of transformers alone may take longer than the doctor waits for a call."""
    within = []

    def noted(returned):
        return lambda *_: within.append(threading.current_thread().name) or returned

    monkeypatch.setattr(doctor_calls.tokenizer, "load_tokenizer", noted("tokenizer"))
    monkeypatch.setattr(doctor_calls.plain_text, "control_tokens", lambda tokenizer: {})
    monkeypatch.setattr(doctor_calls.templates, "make_template", noted("template"))
    monkeypatch.setattr(doctor_calls.template_trial, "unread_answer", lambda template: None)
    monkeypatch.setattr(doctor_calls.template_trial, "try_template", noted([]))
    config = parse_config(RAW)
    found = doctor_calls.check_template("rollout.template", "mine:T", Path("m"), config, QUESTION)
    trial = "doctor-trial"
    assert found.level == "good" and within == [threading.current_thread().name, trial, trial]
