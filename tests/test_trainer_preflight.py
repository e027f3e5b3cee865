"""What is asked before anything slow starts: files of the retriever, prompts, the place for the scores,
Ray."""

import asyncio
import signal
from types import MappingProxyType

import pytest

from services.contracts import Question
from services.rollout.worker.loop import PromptTooLongError
from services.settings import RolloutSettings
from trainer.commands.cli import main
from trainer.config.schema import ConfigError, parse_config
from trainer.session import system
from trainer.session.preflight import check_prompts, check_retrievers

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
    with pytest.raises(PromptTooLongError) as e:
        check_prompts("data.train", questions, Words(), settings)
    assert str(e.value).startswith("data.train: question long: its prompt has ")
    assert "rollout.max_prompt_tokens=8" in str(e.value)
    assert e.value.exit_code == 2


@pytest.mark.parametrize(("key", "kind"), [("index", "folder"), ("corpus", "file")])
def test_an_index_or_corpus_that_is_not_there_is_said_before_ray_starts(tmp_path, key, kind):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=rf"^retriever\.{key}: {nowhere}: no such {kind}"):
        check_retrievers(parse_config(BASE | {"retriever": {key: nowhere}}))
    elsewhere = {"retriever": {"corpus": "lab:train_corpus:0"}, "evaluation": {"retriever": {key: nowhere}}}
    with pytest.raises(ConfigError, match=rf"^evaluation\.retriever\.{key}: "):
        check_retrievers(parse_config(BASE | elsewhere))


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
    assert len(system.questions_of(config, str(file), said.append)) == 1
    assert said == [f"{file}: 1 malformed rows left out (data.skip_bad)"]


class Ranks:
    """Of a learner."""

    def demand(self):
        return {"CPU": 1}


def rooms(monkeypatch, *supplies, address):
    """Wait for room of two workers and a rank, in a cluster that has one supply after the other; how often it
    was asked."""
    left, asked = list(supplies), []

    def resources():
        asked.append(1)
        return {"CPU": left.pop(0) if len(left) > 1 else left[0]}

    monkeypatch.setattr(system.ray, "cluster_resources", resources)
    monkeypatch.setattr(system.placement, "SCHEDULE_SECONDS", 1.2)
    monkeypatch.setattr(system, "LOCAL_SECONDS", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", address)
    config = parse_config(BASE | {"retriever": {"url": "http://x"}, "rollout": {"workers": 2}})
    asyncio.run(system.wait_for_room(config, Ranks()))
    return len(asked)


def test_nodes_of_a_cluster_may_still_be_joining(monkeypatch):
    assert rooms(monkeypatch, 1, 2, 3, address="127.0.0.1:6379") == 3


@pytest.mark.parametrize(("address", "seconds"), [("127.0.0.1:6379", "1.2"), ("", "0")])
def test_a_cluster_that_stays_too_small_is_one_line_and_a_local_one_is_not_waited_for(
    monkeypatch, address, seconds
):
    said = rf"ask for CPU 3; the cluster has CPU 2, also after {seconds} s"
    with pytest.raises(system.placement.UnschedulableError, match=said):
        rooms(monkeypatch, 2, address=address)


def test_a_cluster_that_cannot_be_joined_is_one_line_and_signal_handlers_stay(monkeypatch):
    def refuse(**kwargs):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError("ray client\nconnection timeout")

    monkeypatch.setattr(system.ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(system.RayUnavailable) as e:
        system.connect_ray(lambda text: None)
    assert (
        str(e.value) == "RAY_ADDRESS=10.0.0.9:6379: cannot join that cluster: ray client connection timeout"
    )
    assert e.value.exit_code == 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_local_ray_that_is_not_up_in_time_is_one_line_that_says_what_helps(monkeypatch):
    def late(**kwargs):
        raise Exception(
            "The current node timed out during startup. This could happen because\n"
            "the raylet failed to startup."
        )

    monkeypatch.setattr(system.ray, "init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        system.RayUnavailable,
        match=r"^a local Ray did not start \(on a busy machine: .*timed out during startup",
    ) as e:
        system.connect_ray(lambda text: None)
    assert e.value.exit_code == 3 and "\n" not in str(e.value)


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """`unspiral eval` with the scoring itself replaced; the keyword arguments that it was called with."""
    calls = []

    def score(settings, **kwargs):
        calls.append(kwargs)
        return {"overall": {"em": 0.5, "f1": 0.5, "n": 2}}

    monkeypatch.setattr("trainer.commands.evaluate.run_eval", score)
    config = tmp_path / "c.yaml"
    config.write_text("{model: {path: m}, data: {train: t.jsonl}, retriever: {url: 'http://x'}}")

    def call(out):
        with pytest.raises(SystemExit) as e:
            main(["eval", "--config", str(config), "--out", str(out)])
        return e.value.code, calls

    return call


def test_the_folder_of_the_scores_is_made(scored, tmp_path):
    assert scored(tmp_path / "a" / "b" / "x.json")[0] == 0
    assert (tmp_path / "a" / "b" / "x.json").is_file()


def test_a_place_where_scores_cannot_be_written_is_refused_before_the_scoring(scored, tmp_path):
    (tmp_path / "file").write_text("")
    assert scored(tmp_path / "file" / "x.json") == (2, [])
    assert scored(tmp_path) == (2, [])


@pytest.mark.parametrize(("limit", "rows"), [(None, None), (3, 3)])
def test_eval_scores_every_row_unless_it_is_given_a_limit(monkeypatch, limit, rows):
    from trainer.commands.evaluate import run_eval

    class Seen(Exception):
        pass

    def serving(config, model, say, on_event):
        raise Seen(config.evaluation.limit)

    monkeypatch.setattr("trainer.commands.evaluate.start_serving", serving)
    monkeypatch.setattr("trainer.data.models.resolve", lambda path: path)
    raw = {
        "model": {"path": "m"},
        "data": {"train": "t", "eval": "e"},
        "retriever": {"url": "http://x"},
        "evaluation": {"limit": 7},
    }
    with pytest.raises(Seen) as e:
        run_eval(parse_config(raw), limit=limit)
    assert e.value.args == (rows,)
