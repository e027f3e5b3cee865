"""A retriever that does not start: the setting that bounds the wait is named, before anything slow."""

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest

from retriever_service.errors import RetrieverUnavailable
from services import launcher
from services.common.errors import EnvironmentLacks
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

    def late(*_, timeout):
        raise launcher.ray.exceptions.GetTimeoutError

    for name, stands_in in (("remote", lambda cls: Remote()), ("get", late), ("kill", killed.append)):
        monkeypatch.setattr(launcher.ray, name, stands_in)
    monkeypatch.setattr(launcher, "_here", lambda: None)
    monkeypatch.setattr(launcher, "_host", lambda: "127.0.0.1")
    with pytest.raises(EnvironmentLacks) as e:
        launcher.start_retriever("i", topk=3, name="n", timeout_seconds=300, key="retriever.limit")
    assert str(e.value) == (
        "n: did not start within retriever.limit=300; a large index or a busy machine needs more: set "
        "retriever.limit"
    )
    assert made[0][2:] == ("i", 3, 301) and len(killed) == 1
