"""`retrieval/blank`: documents without a text, how they are told from passages of one line, and the alarm."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sick_runs import BEGINS, STEPS, healthy_run, rows, sick_run

from benchmarks.barometer import faults
from benchmarks.barometer.collected import COLUMNS
from benchmarks.grids.kept import columns_of
from retriever_service.answer import Hit
from services.contracts import Action, Observation, Question, TokenBatch, Trajectory
from services.likelihood.metrics.scored_step import ScoredStep
from services.likelihood.metrics.text_metrics import blank_documents, is_blank
from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.phases import PhaseMonitor

QUESTION = Question("q", "Which river?", ("Po",), "test")


def searched(*documents, kept=True):
    """A trajectory with one search that returned these texts."""
    ids = [f"d{i}" for i in range(len(documents))]
    search = Action([1], [-0.5], 0, "search", "<search> po </search>", "po", ids)
    search.documents = list(documents) if kept else None
    answer = Action([1], [-0.5], 0, "answer", "<answer> Po </answer>")
    return Trajectory("t", "g", QUESTION, [1], [search, Observation([2], "o"), answer], "answer")


def alarms_of(run) -> list[Alarm]:
    monitor = PhaseMonitor()
    return [alarm for metrics in run for alarm in monitor.update(metrics).alarms]


@pytest.mark.parametrize(
    "contents", ["", " \n\t ", '"Po"', '"Po"\n', '"Po"\r\n \n', ' "Po" ', '""', '""\n', '""Weird" Po"\n']
)
def test_a_title_alone_and_nothing_at_all_are_blank(contents):
    assert is_blank(contents)


@pytest.mark.parametrize(
    "contents",
    [
        '"Po"\nA river.',
        '"Po"\r\nA river.',
        '""\nA river.',
        "\nA river.",
        "Po\nA river.",
        "The Po is a river.",
        "The Po is a river.\n",
        '"Po" is a river.',
        'A river, "Po"',
        '"Po"\n"A river."',
        '"',
        "x",
    ],
)
def test_a_text_is_one_with_and_without_a_title(contents):
    assert not is_blank(contents)


def test_the_share_is_of_all_documents_of_the_steps_searches():
    step = [searched('"Po"\n', '"Po"\nA river.', ""), searched(), searched("The Po is a river.")]
    assert blank_documents(step) == {"retrieval/blank": 0.5}
    assert blank_documents([searched("One line."), searched("Another.")]) == {"retrieval/blank": 0.0}


def test_without_a_document_or_its_text_there_is_no_share():
    answered = Trajectory("t", "g", QUESTION, [1], [Action([1], [-0.5], 0, "answer", "a")], "answer")
    assert blank_documents([searched(), answered, searched('"Po"\n', kept=False)]) == {}


def test_a_step_records_it_beside_the_share_of_empty_searches():
    trajectories = [searched('"Po"\n', '"Po"\nA river.'), searched()]
    batch = TokenBatch.of(trajectories)
    batch.logp_old = np.full(len(batch.token_ids), -1.0)
    found = ScoredStep(trajectories, batch, [1.0, 0.0], np.array([0.5, -0.5])).metrics()
    assert (found["retrieval/empty"], found["retrieval/blank"]) == (0.5, 0.5)


def test_a_cell_of_the_barometer_keeps_it_and_its_fault_is_what_is_counted():
    found = [Hit("a", '"n1"\nborn n2', 2.0), Hit("b", '"n3"\nborn n4', 1.0)]
    fault = faults.EmptyDocuments(3)
    shares = []
    for step in (fault.begins - 1, fault.begins):
        fault.step = step
        contents = [hit.contents for hit in fault.found("q", found, None)]
        shares.append(blank_documents([searched(*contents)]))
    assert shares == [{"retrieval/blank": 0.0}, {"retrieval/blank": 1.0}]
    assert columns_of(shares, COLUMNS) == {"retrieval/blank": [0.0, 1.0]}


def test_the_alarm_says_what_is_wrong_and_where_to_look():
    (alarm,) = alarms_of(sick_run("titles alone", 0))
    assert (alarm.rule, alarm.metric) == ("retrieval", "retrieval/blank") and alarm.step > BEGINS
    assert "no text besides a title in " in alarm.seen and " of the documents" in alarm.seen
    assert alarm.advice == (
        f"The index or the service hands titles alone: look at a search of step {alarm.since} or later "
        "(unspiral index search)."
    )
    (other,) = alarms_of(sick_run("no documents", 0))
    assert other.metric == "retrieval/empty" and "titles alone" not in other.advice


@pytest.mark.parametrize("level", [0.0, 0.3, 0.9, 1.0])
def test_a_corpus_that_always_has_bare_titles_is_no_alarm(level):
    for seed in range(5):
        run = healthy_run(seed)
        noise = np.random.default_rng(seed).normal(0, 0.03, STEPS)
        run["retrieval/blank"] = np.clip(level + noise, 0, 1)
        assert alarms_of(rows(run)) == []


def test_a_run_that_does_not_record_it_is_judged_as_before():
    monitor = PhaseMonitor()
    for step in range(1, 61):
        monitor.update({"step": step, "retrieval/empty": 0.02 + 0.001 * (step % 3)})
    assert "retrieval" not in monitor.undecided()
    kind = sick_run("no documents", 0)
    without = [{k: v for k, v in m.items() if k != "retrieval/blank"} for m in kind]
    assert [a.as_dict() for a in alarms_of(without)] == [a.as_dict() for a in alarms_of(kind)]


def test_a_state_from_before_the_metric_is_taken_up():
    run = sick_run("titles alone", 1)
    first, second = PhaseMonitor(), PhaseMonitor()
    for metrics in run[:50]:
        first.update({k: v for k, v in metrics.items() if k != "retrieval/blank"})
    kept = json.loads(json.dumps(first.state_dict()))
    kept["detectors"]["retrieval"]["channels"].pop()
    second.load_state_dict(kept)
    found = [a for metrics in run[50:] for a in second.update(metrics).alarms]
    assert [(a.rule, a.metric) for a in found] == [("retrieval", "retrieval/blank")]
