"""A retriever that does not start: the setting that bounds the wait is named, before anything slow."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from made_server import Quiet, serving

from retriever_service.errors import RetrieverUnavailable
from services import launcher
from services.common.errors import EnvironmentLacks, UserError
from services.common.processes.patience import Patience
from trainer.config.schema import parse_config
from trainer.session import run_services, startup
from trainer.session.preflight import retrievers

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "run": {"name": "r"}}


def config_of(key, url, seconds=60.0):
    """A configuration whose training retriever, or that of the held-out questions, has this address."""
    there = {"url": url, "start_timeout_seconds": seconds}
    if key == "retriever":
        return parse_config(BASE | {"retriever": there})
    return parse_config(BASE | {"retriever": {"index": "i"}, "evaluation": {"retriever": there}})


@pytest.fixture
def held():
    """A socket that is bound and does not listen: its port refuses connections, and nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


@pytest.mark.parametrize("key", ["retriever", "evaluation.retriever"])
def test_an_address_at_which_nothing_listens_is_named_with_what_is_accepted(held, key):
    port = held.getsockname()[1]
    with pytest.raises(EnvironmentLacks) as e:
        retrievers.check_addresses(config_of(key, f"http://me:pass@127.0.0.1:{port}", 0.1))
    assert str(e.value) == (
        f"{key}.url: nothing listens at http://***@127.0.0.1:{port}, tried for 0.1 s (Connection refused); "
        f"expected a running retriever there, such as `unspiral serve retriever INDEX --port {port}`; or "
        f"give {key}.index or .corpus, and the run starts one itself"
    )
    assert e.value.exit_code == 3


def test_a_server_that_begins_to_listen_within_seconds_is_not_missed(held, monkeypatch):
    connect = socket.create_connection
    refused = []

    def tried(*arguments):
        try:
            return connect(*arguments)
        except ConnectionRefusedError:
            refused.append(arguments)
            held.listen()
            raise

    monkeypatch.setattr(retrievers.socket, "create_connection", tried)
    retrievers.check_addresses(config_of("retriever", f"http://127.0.0.1:{held.getsockname()[1]}"))
    assert len(refused) == 1


def test_it_is_said_before_ray_starts(held, monkeypatch):
    monkeypatch.setattr(startup, "connect_ray", lambda say: pytest.fail("Ray was started"))
    for name in ("load_tokenizer", "held_out_of"):
        monkeypatch.setattr(startup, name, lambda *arguments: None)
    config = config_of("retriever", f"http://127.0.0.1:{held.getsockname()[1]}", 0.1)

    async def serve():
        async with startup.start_serving(config, "m", lambda text: None, lambda event: None):
            pass

    with pytest.raises(EnvironmentLacks, match=r"^retriever\.url: nothing listens at "):
        asyncio.run(serve())


@pytest.mark.parametrize(("name", "key"), run_services.SECTIONS.items())
def test_one_that_never_gets_ready_names_the_setting_and_the_accepted_answer(name, key, monkeypatch):
    async def loading(self, seconds, on_wait):
        raise RetrieverUnavailable(f"retriever at {self.url}: not ready after {seconds:g} s: 503")

    monkeypatch.setattr(run_services.RetrieverClient, "wait_ready", loading)
    config = config_of(key, "http://x", 7.0)
    settings = config.retriever if key == "retriever" else config.evaluation.retriever

    async def ask():
        async with AsyncExitStack() as stack:
            await run_services.retriever_address(settings, name, config, stack, lambda text: None)

    with pytest.raises(EnvironmentLacks) as e:
        asyncio.run(ask())
    assert str(e.value) == (
        "retriever at http://x: not ready after 7 s: 503; expected: 200 from its /readyz, or 404 where it "
        f"has none; {key}.start_timeout_seconds=7 is the longest wait"
    )


@contextmanager
def answering(status, body):
    """The address of a server that is ready, and answers each search so; and what it was asked."""
    asked = []

    class Handler(Quiet):
        def do_GET(self):
            self.answer(200, b"{}")

        def do_POST(self):
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            self.answer(status, body)

    with serving(Handler) as url:
        yield url, asked


def address_of(key, url):
    """What a start finds at an address, with a second for a search."""
    config = config_of(key, url)
    settings = config.retriever if key == "retriever" else config.evaluation.retriever
    settings.timeout_seconds = 1.0
    name = next(name for name, section in run_services.SECTIONS.items() if section == key)

    async def ask():
        async with AsyncExitStack() as stack:
            return await run_services.retriever_address(settings, name, config, stack, lambda text: None)

    return asyncio.run(ask())


@pytest.mark.parametrize("key", ["retriever", "evaluation.retriever"])
@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"<html>sign in</html>", "no usable answer"),
        (200, b"[]", "no usable answer"),
        (404, b"{}", "no answer"),
        (500, b"boom", "no answer"),
    ],
    ids=["a page", "a list", "no such path", "broken"],
)
def test_a_server_that_is_no_retriever_is_told_by_a_first_search(key, status, body, why):
    """Before models are loaded and workers started."""
    with answering(status, body) as (url, _), pytest.raises(EnvironmentLacks) as e:
        address_of(key, url)
    said = str(e.value)
    assert said.startswith(f"retriever at {url}: {why} within 1 s (") and "\n" not in said
    assert said.endswith(
        f"; expected: at {key}.url a server that answers POST /retrieve as Search-R1's does; "
        f"{key}.timeout_seconds=1 is the longest wait"
    )
    assert e.value.exit_code == 3


def test_one_that_refuses_the_search_names_its_key():
    with answering(413, b'{"detail": "topk: at most 2"}') as (url, _), pytest.raises(UserError) as e:
        address_of("retriever", url)
    assert str(e.value).startswith(f"retriever.url: retriever at {url}: ") and "topk: at most 2" in str(
        e.value
    )


def test_the_first_search_is_one_request_and_may_find_nothing():
    with answering(200, b'{"result": [[]]}') as (url, asked):
        assert address_of("retriever", url) == url
    assert asked == [("/retrieve", {"queries": [run_services.FIRST_QUERY], "topk": 3, "return_scores": True})]


def test_a_service_that_takes_longer_than_its_setting_names_it_and_the_server_gets_as_long(monkeypatch):
    made, killed = [], []

    class Remote:
        def options(self, **_):
            return self

        def remote(self, *arguments):
            made.append(arguments)
            return self

        @property
        def url(self):
            return self

    now = [0.0]

    def late(*_, timeout):
        now[0] += timeout
        raise launcher.ray.exceptions.GetTimeoutError

    for name, stands_in in (("remote", lambda cls: Remote()), ("get", late), ("kill", killed.append)):
        monkeypatch.setattr(launcher.ray, name, stands_in)
    monkeypatch.setattr(launcher, "_here", lambda: None)
    monkeypatch.setattr(launcher, "_host", lambda: "127.0.0.1")
    used = [0.0, 0.0]  # nothing is done until it is late
    monkeypatch.setattr(launcher, "_processor_seconds", lambda cls: used[0] + used[1] * now[0])
    monkeypatch.setattr(launcher, "Patience", partial(Patience, clock=lambda: now[0]))
    with pytest.raises(EnvironmentLacks) as e:
        launcher.start_retriever("i", topk=3, name="n", timeout_seconds=300, key="retriever.limit")
    assert str(e.value) == (
        "n: did not start within retriever.limit=300; a large index or a busy machine needs more: set "
        "retriever.limit"
    )
    assert made[0][2:] == ("i", 3, 301, 1) and len(killed) == 1
    used[1] = 0.5  # it works, on half a core
    with pytest.raises(EnvironmentLacks, match=r"retriever\.limit=300, 600 s by the clock; a large index or"):
        launcher.start_retriever("i", topk=3, name="n", timeout_seconds=300, key="retriever.limit")


def test_the_processor_time_of_a_starting_actor_is_seen(monkeypatch):
    def process(seconds, *command):
        times = SimpleNamespace(user=seconds, system=0.0)
        return SimpleNamespace(cmdline=lambda: list(command), cpu_times=lambda: (times.user, times.system))

    there = [
        process(1.0, "ray::_RetrieverActor.__init__", ""),
        process(2.0, "python", "/x/default_worker.py", "--y"),
        process(4.0, "ray::IDLE", ""),
        process(8.0, "ray::DashboardAgent"),
        process(16.0, "ray::Worker.sample"),
        process(32.0),
    ]
    monkeypatch.setattr(launcher.psutil, "process_iter", lambda: iter(there))
    assert launcher._processor_seconds(launcher._RetrieverActor) == 7.0


def test_an_index_that_a_run_makes_is_opened_where_it_is_made(monkeypatch, tmp_path):
    """So that two retrievers do not compile the search at the same time, within their limits."""
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "1", "contents": "one\\ntwo"}\n')
    opened = []
    monkeypatch.setattr(launcher.backends, "open_index", lambda settings: opened.append(settings.index))
    assert launcher.index_corpus(corpus, tmp_path / "index", skip_bad=False).count == 0
    assert opened == [str(tmp_path / "index")]
    monkeypatch.setattr(launcher, "COMPILED_BYTES", 1)
    launcher.index_corpus(corpus, tmp_path / "index", skip_bad=False)
    assert len(opened) == 1
