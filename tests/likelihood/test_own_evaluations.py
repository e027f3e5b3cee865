"""What `unspiral eval` and training left in a run's folder, as pages and for programs."""

from __future__ import annotations

import json
import re
from contextlib import closing

import httpx
import pytest

from services.common.runs.kept_answers import protocol_file
from services.common.shares import wilson
from services.likelihood.records import StepRecord
from services.likelihood.rest.evaluated.kept import kept_in, own_files, protocol_of
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.store.sqlite.store import SQLiteStore
from trainer.commands.work.shown_answers import show_on_pages

HOSTILE = "<img src=x onerror=alert(1)>"


def row(number, right, source="mine"):
    return {
        "key": f"q{number}",
        "sample": 0,
        "set": source,
        "id": f"q{number}",
        "question": f"question {number} {HOSTILE}?",
        "golden_answers": ["Rome"],
        "answer": "Rome" if right else None,
        "scores": {"em": float(right), "f1": 1.0 if right else 0.5},
        "finish": "answer",
        "searches": [{"query": f"query {number}", "documents": ["d1"]}],
        "text": f"<answer> {number} </answer>",
    }


def trajectory(right):
    text = "<think> x </think><answer> Rome </answer>"
    segments = [
        {"by": "environment", "text": "<information> d </information>"},
        {"by": "model", "text": text},
    ]
    asked = {"question": "where?", "golden_answers": ["Rome"], "data_source": "held"}
    return asked | {"reward": float(right), "finish": "answer", "segments": segments}


def written(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return file


@pytest.fixture
def run(tmp_path):
    """A run's folder with sixty own answers, and some more in other places."""
    run = tmp_path / "mine"
    answers = [row(i, i % 3 == 0, "a" if i < 20 else "b") for i in range(60)]
    about = {"method": "agent", "model": {"name": "runs/mine/step_2"}, "protocol": {"template": "search_r1"}}
    written(run / "eval" / "answers.jsonl", answers)
    (run / "eval" / "protocol.json").write_text(json.dumps(about))
    written(run / "eval" / "held.answers.jsonl", answers[:3])
    written(run / "eval" / "search7-agent" / "answers.jsonl", answers)
    (run / "eval" / "search7-agent" / "plan.json").write_text("{}")
    written(run / "eval" / "torn.jsonl", [{"key": 1}])
    written(run / "trajectories" / "eval_before_greedy.jsonl", [trajectory(False), trajectory(True)])
    return run


@pytest.fixture
def asked(run):
    with serve_in_thread(ServeSettings(store=str(run / "likelihood.db"), port=0)) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            http.post("/v1/runs/mine/steps", json={"step": 1, "metrics": {"x": 1.0}}).raise_for_status()
            yield http


def test_the_answers_of_a_folder_are_found_by_name_and_scored(run):
    files = own_files(run)
    assert {name: file.relative_to(run).as_posix() for name, file in files.items()} == {
        "answers": "eval/answers.jsonl",
        "held": "eval/held.answers.jsonl",
    }
    kept = kept_in(files["answers"])
    assert (kept.scores.n, kept.scores.em, kept.scores.searches) == (60, pytest.approx(1 / 3), 1)
    assert kept.scores.f1 == pytest.approx(2 / 3) and kept.scores.interval == wilson(kept.scores.em, 60)
    assert {name: one.n for name, one in kept.sources.items()} == {"a": 20, "b": 40}
    assert protocol_of(files["answers"])["model"] == {"name": "runs/mine/step_2"}
    assert protocol_of(files["held"]) == {}
    written(files["held"], [row(1, True)])
    assert kept_in(files["held"]).scores.n == 1, "a file that was written anew is read anew"


def test_the_answer_to_a_held_out_question_is_the_one_that_the_reward_read(run):
    thought = "<think> maybe <answer> Lyon </answer> </think>"
    texts = [{"by": "model", "text": f"<answer> Rome </answer>{thought}"}]
    lines = [trajectory(True) | {"answer": "Rome", "segments": texts}]
    lines.append(trajectory(False) | {"answer": None, "segments": [{"by": "model", "text": thought}]})
    lines.append(trajectory(False))  # of an earlier version
    kept = kept_in(written(run / "trajectories" / "eval_after_greedy.jsonl", lines))
    assert [one.answer for one in kept.read([at for at, _, _ in kept.places])] == ["Rome", None, "Rome"]
    assert kept.scores.answered == pytest.approx(2 / 3)


def test_programs_get_names_and_scores(asked):
    assert asked.get("/v1/runs/mine/evaluations").json() == ["answers", "held"]
    found = asked.get("/v1/runs/mine/evaluations/answers").json()
    low, high = wilson(20 / 60, 60)
    assert found["scores"] == {
        "n": 60,
        "em": {"mean": pytest.approx(1 / 3), "low": pytest.approx(low), "high": pytest.approx(high)},
        "f1": pytest.approx(2 / 3),
        "searches": 1.0,
        "answered": pytest.approx(1 / 3),
    }
    assert found["protocol"] == {"template": "search_r1"} and found["sources"]["a"]["n"] == 20
    assert asked.get("/v1/runs/mine/evaluations/none").status_code == 404


def test_the_list_has_own_questions_and_those_of_training(asked):
    metrics = {"eval/em_greedy": 0.5}
    data = {"tag": "before", "mode": "greedy", "overall": {"em": 0.5, "f1": 0.6, "n": 2}, "metrics": metrics}
    event = {"step": 0, "kind": "evaluation", "text": "before", "data": data}
    asked.post("/v1/runs/mine/events", json=event).raise_for_status()
    page = asked.get("/runs/mine/evaluations").text
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Own questions, by unspiral eval",
        "Held-out questions of training",
    ]
    assert 'href="evaluations/answers"' in page and "runs/mine/step_2, template search_r1" in page
    assert 'href="evaluations/eval_before_greedy">before training</a>' in page
    assert "0.500" in page and "0.600" in page and "0.095–0.905" in page


def test_held_out_scores_that_another_trainer_posts_are_in_the_list(asked):
    """In the form of docs/likelihood_service.md: the live page shows them."""
    asked.post("/v1/runs/theirs/steps", json={"step": 7, "metrics": {}}).raise_for_status()
    metrics = {"eval/em_greedy": 0.25, "eval/f1_greedy": 0.5, "eval/em_sampled": 0.125, "val/loss": 3.0}
    event = {"step": 7, "kind": "evaluation", "text": "held out", "data": {"metrics": metrics}}
    asked.post("/v1/runs/theirs/events", json=event).raise_for_status()
    page = asked.get("/runs/theirs/evaluations").text
    assert "This run has none" not in page
    rows = re.findall(r"<tr><th.*?</tr>", page, re.DOTALL)
    texts = [re.sub(r"<[^>]*>", " ", row).split() for row in rows]
    shown = {text[-6]: (text[:2], text[-5:-2]) for text in texts[1:]}
    step = ["step", "7"]
    assert shown == {"greedy": (step, ["0.250", "0.500", "–"]), "sampled": (step, ["0.125", "–", "–"])}


def test_a_page_of_answers_is_read_in_parts_by_verdict_source_and_words(asked):
    page = asked.get("/runs/mine/evaluations/answers").text
    assert page.count("<li value=") == 50 and "1 to 50 of 60 answers" in page and HOSTILE not in page
    assert "How it was asked" in page and "protocol.template" in page
    rest = asked.get("/runs/mine/evaluations/answers?first=51").text
    assert re.findall(r'<li value="(\d+)"', rest) == [str(n) for n in range(51, 61)]
    right = asked.get("/runs/mine/evaluations/answers?show=right&source=a").text
    assert right.count("✓ right") == 7 and "✗ wrong" not in right
    found = asked.get("/runs/mine/evaluations/answers", params={"find": "QUESTION 41"}).text
    assert found.count("<li value=") == 1 and "query 41" in found
    assert "No such answer." in asked.get("/runs/mine/evaluations/answers?find=nowhere").text
    trained = asked.get("/runs/mine/evaluations/eval_before_greedy").text
    assert trained.count("<li value=") == 2 and "&lt;information&gt;" in trained
    assert '?first=51">next →</a>' in page and '">← previous</a>' in rest


CONFIG = """
model: {path: models/mine}
data: {eval: held.jsonl}
retriever: {url: null, index: wiki, corpus: null}
evaluation: {limit: 200, retriever: {url: null, index: RETRIEVER, corpus: null}}
rollout: {template: search_r1, topk: 3, max_turns: 4, max_response_tokens: 500, temperature: 0.7, workers: 2}
"""


def evaluated(http, step, tag, mode, **overall):
    data = {"tag": tag, "mode": mode, "overall": overall, "metrics": {}}
    event = {"step": step, "kind": "evaluation", "text": tag, "data": data}
    http.post("/v1/runs/mine/events", json=event).raise_for_status()


def facts(page):
    return dict(re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td></tr>', page))


@pytest.mark.parametrize(("index", "told"), [("own", "own"), ("null", "wiki")])
def test_held_out_questions_of_training_say_of_which_weights_and_how_they_were_asked(asked, run, index, told):
    (run / "config.yaml").write_text(CONFIG.replace("RETRIEVER", index))
    for mode in ("greedy", "sampled"):
        written(run / "trajectories" / f"eval_after_{mode}.jsonl", [trajectory(True)])
        evaluated(asked, 12, "after", mode, em=1.0, f1=0.625, n=1)
    page = asked.get("/runs/mine/evaluations/eval_after_sampled").text
    assert "<h2>step 12, sampled: held-out questions of mine</h2>" in page
    assert "asked while the run trained; eval_after_sampled; " in page
    assert 'class="n">F1</th>' in page and "0.625" in page
    assert facts(page) == {
        "checkpoint": "mine, step 12",
        "model": "models/mine",
        "questions": "held.jsonl",
        "limit": "200",
        "retriever.index": told,
        "temperature": "0.7",
        "template": "search_r1",
        "max_turns": "4",
        "topk": "3",
        "max_response_tokens": "500",
    }
    assert facts(asked.get("/runs/mine/evaluations/eval_after_greedy").text)["temperature"] == "0"
    assert asked.get("/v1/runs/mine/evaluations?of=training").json() == [
        "eval_after_greedy",
        "eval_after_sampled",
        "eval_before_greedy",
    ]


@pytest.mark.parametrize("config", [None, "{", "- 1", "rollout: 3", "rollout: {template: [x]}\nretriever: 7"])
def test_held_out_questions_are_shown_without_a_configuration_that_can_be_read(asked, run, config):
    if config:
        (run / "config.yaml").write_text(config)
    evaluated(asked, 0, HOSTILE, "greedy", em=1.0)
    evaluated(asked, 0, "before", "greedy", f1="high")
    page = asked.get("/runs/mine/evaluations/eval_before_greedy").text
    assert "before training, greedy: held-out questions of mine" in page and page.count("<li value=") == 2
    assert ("How it was asked" in page) == ("template" in (config or "")) and "F1</th>" not in page


def test_what_is_not_there_is_said_and_the_list_is_empty_only_where_there_is_nothing(asked, run):
    unknown = asked.get("/runs/none/evaluations")
    assert unknown.status_code == 404 and "No run none in this store." in unknown.text
    missing = asked.get("/runs/mine/evaluations/none")
    assert missing.status_code == 404 and "mine has no evaluation none" in missing.text
    assert "This run has none" not in asked.get("/runs/mine/evaluations").text
    asked.post("/v1/runs/bare/steps", json={"step": 1, "metrics": {"x": 1.0}}).raise_for_status()
    assert "This run has none" in asked.get("/runs/bare/evaluations").text


def test_answers_that_were_kept_elsewhere_are_copied_to_the_runs_folder(run, tmp_path):
    said = []
    answers = written(tmp_path / "out" / "scores.answers.jsonl", [row(1, True)])
    protocol_file(answers).write_text('{"method": "agent"}')
    show_on_pages(answers, run, said.append)
    assert not said and "scores" not in own_files(run), "no run was recorded there: it has no pages"
    (run / "metrics.jsonl").write_text("")
    show_on_pages(answers, run, said.append)
    copy = run / "eval" / "scores.answers.jsonl"
    assert said == [f"the run's pages show these answers too: {copy}"] and own_files(run)["scores"] == copy
    assert protocol_of(copy) == {"method": "agent"}
    show_on_pages(copy, run, said.append)
    assert len(said) == 1, "what lies in the folder stays as it is"


def test_a_folder_in_which_nothing_was_trained_has_its_evaluations_too(run):
    with closing(SQLiteStore(run / "likelihood.db")) as store:
        store.put_step("mine", StepRecord(step=1, metrics={"x": 1.0}))
    bare = run.parent / "bare"
    written(bare / "eval" / "answers.jsonl", [row(1, True)])
    (run.parent / "none" / "eval").mkdir(parents=True)
    with serve_in_thread(ServeSettings(store=str(run.parent), port=0)) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            assert 'href="/runs/bare/evaluations">bare</a>.' in http.get("/runs/mine/evaluations").text
            page = http.get("/runs/bare/evaluations")
            assert page.status_code == 200 and 'href="evaluations/answers"' in page.text
            assert http.get("/runs/bare/evaluations/answers").text.count("<li value=") == 1
            for path in ("", "/answers", "/none"):  # there is no page of a run to lead to
                page = http.get(f"/runs/bare/evaluations{path}").text
                assert '<a href="/">← all runs</a>' in page and "/#runs=bare" not in page
            assert '<a href="/#runs=mine">← run mine</a>' in http.get("/runs/mine/evaluations").text
            assert "/#runs=none" not in http.get("/runs/none/evaluations").text
            assert http.get("/v1/runs/bare/evaluations").json() == ["answers"]
            assert http.get("/runs/none/evaluations").status_code == 404
