"""What is asked before anything slow starts: files of the retriever, prompts, the place for the scores,
Ray."""

import asyncio
import gc
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import psutil
import pytest
from command_line import run  # noqa: F401
from end_to_end import ENVIRONMENT

from services.common.errors import EnvironmentLacks, UserError
from services.common.processes import signals
from services.common.processes.alive import is_alive
from services.contracts import Question
from services.settings import RolloutSettings
from trainer.commands.checks.doctor import check_config
from trainer.commands.cli import main
from trainer.config.schema import load_config, parse_config
from trainer.lab import demo as _lab  # noqa: F401  # registers the names of its files (lab:train_corpus:0)
from trainer.session import startup, waits
from trainer.session.own_parts import OwnParts
from trainer.session.preflight import check_prompts, check_retrievers
from trainer.session.stopping import StopSignals

NO_PARTS = OwnParts(lambda trajectory: 1.0, {})
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
    assert (status, err) == (2, "unspiral: --data: none.jsonl: no such file or folder\n")
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

    monkeypatch.setattr(startup.ray, "cluster_resources", resources)
    monkeypatch.setattr(startup.placement, "SCHEDULE_SECONDS", 1.2)
    monkeypatch.setattr(startup, "LOCAL_SECONDS", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", address)
    config = parse_config(BASE | {"retriever": {"url": "http://x"}, "rollout": {"workers": 2}})
    asyncio.run(startup.wait_for_room(config, Ranks()))
    return len(asked)


def test_nodes_of_a_cluster_may_still_be_joining(monkeypatch):
    assert rooms(monkeypatch, 1, 2, 3, address="127.0.0.1:6379") == 3


@pytest.mark.parametrize(("address", "seconds"), [("127.0.0.1:6379", "1.2"), ("", "0")])
def test_a_cluster_that_stays_too_small_is_one_line_and_a_local_one_is_not_waited_for(
    monkeypatch, address, seconds
):
    said = rf"ask for CPU 3; the cluster has CPU 2, also after {seconds} s"
    with pytest.raises(EnvironmentLacks, match=said):
        rooms(monkeypatch, 2, address=address)


def test_a_local_ray_without_room_is_told_before_anything_is_indexed_or_started(monkeypatch):
    async def start(*arguments, **options):
        raise AssertionError("a service was started")

    for name in ("connect_ray", "leave_ray", "check_room", "check_prompts", "load_tokenizer"):
        monkeypatch.setattr(startup, name, lambda *arguments, **options: None)
    monkeypatch.setattr(startup, "questions_of", lambda *arguments: [])
    monkeypatch.setattr(startup, "PromptCursor", lambda *arguments: None)
    monkeypatch.setattr(startup, "LearnerGroup", lambda *arguments, **options: Ranks())
    monkeypatch.setattr(startup, "start_services", start)
    monkeypatch.setattr(startup, "LOCAL_SECONDS", 0.0)
    monkeypatch.setattr(startup.ray, "cluster_resources", lambda: {"CPU": 2})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = parse_config(BASE | {"retriever": {"url": "http://x"}, "rollout": {"workers": 2}})

    async def run():
        async with startup.start_system(config, "m", None, lambda text: None, own=NO_PARTS, identity={}):
            raise AssertionError("it started")

    with pytest.raises(EnvironmentLacks, match="ask for CPU 3; the cluster has CPU 2"):
        asyncio.run(run())


def test_records_are_flushed_before_workers_and_retrievers_are_ended(monkeypatch):
    """A worker may hang in its end until the process leaves without another look."""
    ended = []
    said = []

    class Learner(Ranks):
        where = (SimpleNamespace(activations="learner: activations are kept"),)

        def start(self):
            pass

        def close(self):
            ended.append("learner")

    class Pool:
        async def start(self):
            pass

        def workers(self):
            return []

        async def close(self):
            ended.append("workers")

    async def start_services(config, stack, say, *, records):
        stack.callback(ended.append, "retrievers")
        records.callback(ended.append, "records")
        return startup.Services("http://x", None, SimpleNamespace())

    for name in ("connect_ray", "check_room", "check_prompts", "load_tokenizer"):
        monkeypatch.setattr(startup, name, lambda *arguments, **options: None)
    monkeypatch.setattr(startup, "leave_ray", lambda: ended.append("Ray"))
    monkeypatch.setattr(startup, "questions_of", lambda *arguments: [])
    monkeypatch.setattr(startup, "PromptCursor", lambda *arguments: None)
    monkeypatch.setattr(startup, "LearnerGroup", lambda *arguments, **options: Learner())
    monkeypatch.setattr(startup, "start_services", start_services)
    monkeypatch.setattr(startup, "_pool", lambda *arguments, **options: Pool())
    monkeypatch.setattr(startup.ray, "cluster_resources", lambda: {"CPU": 8})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    async def run():
        config = parse_config(BASE | {"retriever": {"url": "http://x"}})
        async with startup.start_system(config, "m", None, said.append, own=NO_PARTS, identity={}):
            assert ended == []

    asyncio.run(run())
    assert ended == ["learner", "records", "workers", "retrievers", "Ray"]
    assert said[-1] == "learner: activations are kept"


class Started:
    """A service."""

    url = "http://127.0.0.1:9"

    def __init__(self, name, log):
        self.name, self.log = name, log

    def stop(self):
        self.log.append(f"{self.name} stopped")


def services(monkeypatch, tmp_path, log, *, fails=None, say=lambda text: None):
    """Start both retrievers and the likelihood service, each in .3 s, or fail at once."""

    def start(name):
        log.append(f"{name} begun")
        if name == fails:
            raise EnvironmentLacks(f"{name}: did not start: bad index")
        time.sleep(0.3)
        log.append(f"{name} started")
        return Started(name, log)

    async def ready(self, *arguments, **options):
        pass

    monkeypatch.setattr(startup, "start_retriever", lambda index, *, name, **_: start(name.split("-")[-1]))
    monkeypatch.setattr(startup, "start_likelihood", lambda store, **_: start("likelihood"))
    monkeypatch.setattr(startup.RetrieverClient, "wait_ready", ready)
    config = parse_config(
        BASE
        | {
            "run": {"dir": str(tmp_path), "name": "r"},
            "retriever": {"index": "i"},
            "evaluation": {"retriever": {"index": "j"}},
        }
    )

    async def run():
        async with AsyncExitStack() as stack, AsyncExitStack() as records:
            return await startup.start_services(config, stack, say, records=records)

    return asyncio.run(run())


NAMES = ("eval_retriever", "likelihood", "retriever")


def test_services_start_at_the_same_time_and_are_stopped_at_the_end(monkeypatch, tmp_path):
    log = []
    found = services(monkeypatch, tmp_path, log)
    assert (found.retriever_url, found.eval_retriever_url) == (Started.url, Started.url)
    for place, what in enumerate(("begun", "started", "stopped")):
        assert sorted(log[3 * place : 3 * place + 3]) == [f"{name} {what}" for name in NAMES]


def test_the_address_of_the_live_page_is_said_once_it_is_served(monkeypatch, tmp_path):
    log = []
    services(monkeypatch, tmp_path, log, say=log.append)
    line = f"live page: {Started.url}/#runs=r"
    assert log.count(line) == 1
    assert log.index("likelihood started") < log.index(line) < log.index("likelihood stopped")


@pytest.mark.parametrize("fails", NAMES)
def test_the_error_of_a_service_is_told_as_it_is_and_the_others_are_stopped(monkeypatch, tmp_path, fails):
    log = []
    with pytest.raises(EnvironmentLacks, match=rf"^{fails}: did not start: bad index$") as e:
        services(monkeypatch, tmp_path, log, fails=fails)
    assert e.value.exit_code == 3
    started = sorted(line.split()[0] for line in log if line.endswith("started"))
    assert started == sorted(line.split()[0] for line in log if line.endswith("stopped"))
    assert len(started) == 2


def test_a_corpus_that_cannot_be_indexed_is_told_before_another_is_indexed(monkeypatch, tmp_path):
    """A thread that indexes cannot be stopped, and would be waited for."""
    indexed = []

    def index(corpus, folder, **options):
        indexed.append(folder.name)
        raise UserError(f"{corpus}:3: not JSON")

    monkeypatch.setattr(startup, "index_corpus", index)
    monkeypatch.setattr(startup.models, "resolve_file", lambda name: name)
    run = {"run": {"dir": str(tmp_path), "name": "r"}}
    corpora = {"retriever": {"corpus": "bad"}, "evaluation": {"retriever": {"corpus": "large"}}}

    async def start():
        async with AsyncExitStack() as stack:
            await startup.start_services(parse_config(BASE | run | corpora), stack, lambda text: None)

    with pytest.raises(UserError, match=r"^bad:3: not JSON$"):
        asyncio.run(start())
    assert indexed == ["retriever_index"]


def test_a_start_that_is_cut_short_waits_a_bounded_time_for_a_service(monkeypatch):
    monkeypatch.setattr(startup, "CANCEL_SECONDS", 0.05)
    over = threading.Event()
    log = []

    def start(seconds):
        over.wait(seconds)
        return Started("slow", log)

    async def cut(seconds):
        async with AsyncExitStack() as stack:
            starting = asyncio.create_task(startup._started(lambda: start(seconds), stack))
            await asyncio.sleep(0.01)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        over.set()

    asyncio.run(cut(30))
    assert log == []  # it is left behind
    over.clear()
    monkeypatch.setattr(startup, "CANCEL_SECONDS", 30.0)
    asyncio.run(cut(0.02))
    assert log == ["slow stopped"]


IN_C = """
import ctypes
from services import local_ray
from services.common.processes import signals
from trainer.session import startup

def start(**options):
    local_ray._WAS_SET[local_ray.OWNER_VARIABLE] = None
    ctypes.CDLL(None).system(b"echo $$; kill -TERM $PPID; sleep 600")

signals.OVERDUE_SECONDS = 0.2
startup.start_local_ray = start
startup.connect_ray(lambda text: None)
"""


def test_a_signal_ends_a_ray_whose_start_does_not_come_back_to_python():
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", IN_C], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stderr.splitlines()[-1] == "unspiral: SIGTERM: Ray did not leave its start; ended with it"
    assert not psutil.pid_exists(int(ended.stdout)) or not is_alive(psutil.Process(int(ended.stdout)))


def test_a_start_that_is_left_behind_and_fails_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(startup, "CANCEL_SECONDS", 0.0)
    over = threading.Event()

    def start():
        over.wait(30)
        raise EnvironmentLacks("the actor never ran")

    async def cut():
        async with AsyncExitStack() as stack:
            starting = asyncio.create_task(startup._started(start, stack))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        over.set()

    asyncio.run(cut())
    gc.collect()
    assert caplog.records == []


def test_a_ray_that_starts_slowly_is_named_while_it_is_waited_for(monkeypatch):
    named = threading.Event()
    said = []

    def say(text):
        said.append(text)
        if text.startswith("waiting since "):
            named.set()

    monkeypatch.setattr(waits, "SAY_SECONDS", 0.05)
    monkeypatch.setattr(startup, "start_local_ray", lambda **options: named.wait(30))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    startup.connect_ray(say)
    assert named.is_set() and "): Ray to start" in said[1]


def test_a_cluster_that_cannot_be_joined_is_one_line_and_signal_handlers_stay(monkeypatch):
    def refuse(**kwargs):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ConnectionError("ray client\nconnection timeout")

    monkeypatch.setattr(startup.ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(EnvironmentLacks) as e:
        startup.connect_ray(lambda text: None)
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

    monkeypatch.setattr(startup.ray, "init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(
        EnvironmentLacks,
        match=r"^a local Ray did not start \(on a busy machine: .*timed out during startup",
    ) as e:
        startup.connect_ray(lambda text: None)
    assert e.value.exit_code == 3 and "\n" not in str(e.value)


def test_the_advice_for_a_late_ray_is_not_what_was_done_already(monkeypatch):
    def late(**kwargs):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(startup.ray, "init", late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_raylet_start_wait_time_s", raising=False)
    with pytest.raises(EnvironmentLacks, match="set RAY_raylet_start_wait_time_s=180"):
        startup.connect_ray(lambda text: None)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    with pytest.raises(EnvironmentLacks, match=r"has less to do\): The current node"):
        startup.connect_ray(lambda text: None)


def test_a_long_temporary_folder_leaves_the_sockets_of_a_local_ray_their_room(monkeypatch, tmp_path):
    """Batch systems give each job one."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    given = {}
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(startup.ray, "init", given.update)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    startup.connect_ray(lambda text: None)
    startup.leave_ray()
    folder = Path(given["_temp_dir"])
    assert len(str(folder)) + 64 <= 107 and folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("own_handler", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_ray_at_once(monkeypatch, number, own_handler):
    def never(**kwargs):
        if own_handler:  # as Ray's for SIGTERM
            signal.signal(number, lambda number, frame: sys.exit(number))
        while True:  # as Ray does: whatever fails inside is tried again
            try:
                signal.raise_signal(number)
                time.sleep(0.01)
            except Exception:
                pass

    monkeypatch.setattr(startup.ray, "init", never)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    async def run():
        with StopSignals(lambda text: None):
            startup.connect_ray(lambda text: None)

    with pytest.raises(signals.Stopped) as e:
        asyncio.run(run())
    assert e.value.exit_code == 128 + number


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """`unspiral eval` with the scoring itself replaced; the keyword arguments that it was called with."""
    calls = []

    def score(settings, **kwargs):
        calls.append(kwargs)
        return {"overall": {"em": 0.5, "f1": 0.5, "n": 2}}

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
