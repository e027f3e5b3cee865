"""What is asked before anything slow starts: files of the retriever, prompts, the place for the scores."""

from pathlib import Path
from types import MappingProxyType

import pytest
from command_line import run  # noqa: F401

from retriever_service.index_folder.description import read_info
from retriever_service.indexing.build import build_index
from services.common.errors import UserError
from services.contracts import Question
from services.settings import RolloutSettings
from trainer.commands.checks.doctor import check_config
from trainer.commands.cli import main
from trainer.config.schema import load_config, parse_config
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its files (lab:train_corpus:0)
from trainer.session import startup
from trainer.session.preflight import retrievers
from trainer.session.preflight.prompts import check_prompts
from trainer.session.preflight.retrievers import check_retrievers

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


class Words:
    """A tokenizer: one word, one token."""

    added_tokens_decoder = MappingProxyType({})
    all_special_ids = ()
    all_special_tokens = ()

    def encode(self, text, add_special_tokens=False):
        return list(range(len(text.split())))


def test_a_prompt_that_is_too_long_is_named_with_its_tokens_and_the_key():
    questions = [
        Question("short", "who ?", ("a",), "nq", None),
        Question("long", "word " * 9, ("a",), "nq", None),
    ]
    settings = RolloutSettings(template="lab", max_prompt_tokens=8, max_obs_tokens=16)
    check_prompts("data.train", questions[:1], Words(), settings)
    with pytest.raises(UserError) as e:
        check_prompts("data.train", questions, Words(), settings)
    assert str(e.value).startswith("data.train: question long: its prompt has ")
    assert "rollout.max_prompt_tokens=8" in str(e.value)
    assert e.value.exit_code == 2


@pytest.mark.parametrize(("key", "kind"), [("index", "folder"), ("corpus", "file")])
def test_an_index_or_corpus_that_is_not_there_is_said_before_ray_starts(tmp_path, key, kind):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match=rf"^retriever\.{key}: {nowhere}: no such {kind}"):
        check_retrievers(parse_config(BASE | {"retriever": {key: nowhere}}))
    elsewhere = {"retriever": {"corpus": "lab:train_corpus:0"}, "evaluation": {"retriever": {key: nowhere}}}
    with pytest.raises(UserError, match=rf"^evaluation\.retriever\.{key}: "):
        check_retrievers(parse_config(BASE | elsewhere))


def test_a_start_reads_the_description_of_an_index_once(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.jsonl").write_text('{"id": "a", "contents": "river"}\n')
    (tmp_path / "q.jsonl").write_text('{"question": "q?", "golden_answers": ["a"]}\n')
    build_index(tmp_path / "c.jsonl", tmp_path / "i")
    (tmp_path / "m").mkdir()
    lines = ["model: {path: m}", "data: {train: q.jsonl}", "retriever: {index: i}", ""]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    read = []
    monkeypatch.setattr(retrievers, "read_info", lambda folder: read.append(folder) or read_info(folder))
    status, _, err = run("train", "--config", "mine.yaml")
    assert (status, read) == (2, ["i"]) and "model.path" in err


def test_what_is_no_question_or_no_index_is_said_by_each_command_at_once(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "questions.jsonl").write_text('{"question": "q?", "golden_answers": ["a"]}\n')
    lines = ["model: {path: m}", "data: {train: questions.jsonl}", "retriever: {index: notes}", ""]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    (tmp_path / "m").mkdir()
    (tmp_path / "words.jsonl").write_text("hello\n")
    elsewhere = ["retriever.index=null", "retriever.url=http://127.0.0.1:9"]
    status, _, err = run("train", "--config", "mine.yaml", "data.train=words.jsonl", *elsewhere)
    assert status == 2 and err.startswith("unspiral: words.jsonl: neither JSON, CSV")
    assert not (tmp_path / "runs").exists()
    wrong = "notes: no index: it has no meta.json"
    status, _, err = run("train", "--config", "mine.yaml")
    assert status == 2 and err.startswith(f"unspiral: retriever.index: {wrong}; `unspiral index build ")
    assert not (tmp_path / "runs").exists()
    status, _, err = run("init", "--model", "m", "--data", "questions.jsonl", "--index", "notes")
    assert status == 2 and err.startswith(f"unspiral: --index: {wrong}")
    assert not (tmp_path / "unspiral.yaml").exists()
    found = {f.what: f for f in check_config(Path("mine.yaml"), load_config(Path("mine.yaml")))}
    assert found["retriever.index"].level == "bad" and wrong in found["retriever.index"].advice


def test_every_placeholder_of_a_configuration_is_named_before_the_run_has_a_folder(
    tmp_path, monkeypatch, run
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "model: {path: models/mine}\ndata: {train: mine/train.jsonl, eval: mine/held_out.jsonl}\n"
        "retriever: {corpus: mine/corpus.jsonl}\n"
    )
    status, _, err = run("train", "--config", "mine.yaml")
    assert status == 2 and err == (
        "unspiral: model.path: models/mine; data.train: mine/train.jsonl; data.eval: mine/held_out.jsonl; "
        "retriever.corpus: mine/corpus.jsonl: no such file or folder\n"
    )
    given = ["retriever.corpus=lab:train_corpus:0", "data.train=lab:train_questions:0", "data.eval=null"]
    status, _, err = run("train", "--config", "mine.yaml", *given)
    assert status == 2 and err.startswith("unspiral: model.path models/mine: no such folder; accepted: ")
    status, _, err = run("eval", "--config", "mine.yaml", "--data", "none.jsonl")
    assert (status, err) == (2, "unspiral: --data none.jsonl: no such file or folder\n")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"]


def test_malformed_rows_that_are_left_out_are_counted_aloud(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "who?", "golden_answers": ["a"]}\n{"question": 3}\n')
    config = parse_config(
        {
            "model": {"path": "m"},
            "data": {"train": str(file), "skip_bad": True},
            "retriever": {"url": "http://x"},
        }
    )
    said = []
    assert len(startup.questions_of(config, str(file), said.append)) == 1
    assert said == [
        "1 row was left out, malformed (data.skip_bad):",
        f"{file}, line 2: expected `golden_answers` (or answers, answer, possible_answers, ground_truth, "
        "reward_model.ground_truth): a list of texts; it has none, its columns are question",
    ]


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """`unspiral eval` with the scoring itself replaced; the keyword arguments that it was called with."""
    calls = []

    def score(settings, **kwargs):
        scores = {"overall": {"em": 0.5, "f1": 0.5, "n": 2}}
        kwargs["on_scores"](scores)
        calls.append(kwargs)
        return scores

    monkeypatch.setattr("trainer.commands.work.evaluate.run_eval", score)
    config = tmp_path / "c.yaml"
    config.write_text("{model: {path: m}, data: {train: t.jsonl}, retriever: {url: 'http://x'}}")

    def call(out):
        with pytest.raises(SystemExit) as e:
            main(["eval", "--config", str(config), "--out", str(out)])
        return e.value.code, calls

    return call


def test_the_folder_of_the_scores_is_made(scored, tmp_path):
    status, (call,) = scored(tmp_path / "a" / "b" / "x.json")
    assert (status, call["answers"]) == (0, tmp_path / "a" / "b" / "x.answers.jsonl")
    assert (tmp_path / "a" / "b" / "x.json").is_file()


def test_a_place_where_scores_cannot_be_written_is_refused_before_the_scoring(scored, tmp_path):
    (tmp_path / "file").write_text("")
    assert scored(tmp_path / "file" / "x.json") == (2, [])
    assert scored(tmp_path) == (2, [])


@pytest.mark.parametrize(("limit", "rows"), [(None, None), (3, 3)])
def test_eval_scores_every_row_unless_it_is_given_a_limit(monkeypatch, limit, rows):
    from trainer.commands.work.evaluate import run_eval

    class Seen(Exception):
        pass

    def serving(config, model, say, on_event):
        raise Seen(config.evaluation.limit)

    monkeypatch.setattr("trainer.commands.work.evaluate.start_serving", serving)
    monkeypatch.setattr("trainer.data.models.resolve", Path)
    raw = {
        "model": {"path": "m"},
        "data": {"train": "t", "eval": "e"},
        "retriever": {"url": "http://x"},
        "evaluation": {"limit": 7},
    }
    with pytest.raises(Seen) as e:
        run_eval(parse_config(raw), limit=limit)
    assert e.value.args == (rows,)
