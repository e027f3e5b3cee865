"""A store of Redis that does not answer: told before Ray starts, with what to do."""

import inspect
from types import SimpleNamespace

import pytest
from ports import kept_port
from redis_server import RedisServer

from services import launcher
from services.common.errors import EnvironmentLacks
from trainer.config.schema import parse_config
from trainer.session import startup
from trainer.session.preflight import stores

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "retriever": {"index": "i"}}


def config_of(url):
    return parse_config(BASE | {"run": {"name": "r"}, "store": {"url": url}})


def test_a_redis_that_does_not_answer_is_named_with_what_else_is_accepted(monkeypatch):
    monkeypatch.setattr(stores, "LISTEN_SECONDS", 0.1)
    port = kept_port()
    with pytest.raises(EnvironmentLacks) as e:
        stores.check_store(config_of(f"redis://:secret@127.0.0.1:{port}/0"))
    assert str(e.value) == (
        f"store.url: likelihood store redis at 127.0.0.1:{port}/0: Error 111 connecting to 127.0.0.1:{port}. "
        "Connection refused, tried for 0.1 s; expected a running Redis there; or leave store.url out, and "
        "the run keeps its records in its own folder"
    )
    assert e.value.exit_code == 3


def test_a_redis_that_comes_up_meanwhile_is_not_missed(tmp_path, monkeypatch):
    server = RedisServer(tmp_path / "redis")
    server.kill()
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        server.start()

    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    try:
        stores.check_store(config_of(server.url))
    finally:
        server.stop()
    assert slept == [stores.TRY_SECONDS]


@pytest.mark.parametrize("url", [None, "sqlite:here.db", "http://127.0.0.1:9"])
def test_no_other_store_is_asked(monkeypatch, url):
    """Records wait for a likelihood service that is away."""
    monkeypatch.setattr(stores, "open_store", lambda url: pytest.fail(f"{url} was opened"))
    stores.check_store(config_of(url))


def test_the_store_is_looked_at_before_ray_starts():
    assert "check_store, config" in inspect.getsource(startup.prepared)


def test_a_service_that_does_not_start_says_why_without_the_kind_of_its_error(monkeypatch):
    said = "The actor died\n  File 'x'\nservices.common.errors.EnvironmentLacks: store s: Error 111: refused"

    def died(*_):
        raise launcher.ray.exceptions.RayActorError(None, said)

    monkeypatch.setattr(launcher, "_url_of", died)
    monkeypatch.setattr(launcher, "_here", lambda: None)
    monkeypatch.setattr(launcher.ray, "remote", lambda cls: Made)
    with pytest.raises(EnvironmentLacks) as e:
        launcher.start_likelihood("s", token_steps=8, name="n")
    assert str(e.value) == "n: did not start: store s: Error 111: refused"


class Made:
    """What `ray.remote` gives."""

    @classmethod
    def options(cls, **_):
        return cls

    @classmethod
    def remote(cls, *_):
        return None
