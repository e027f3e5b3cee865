"""Several workers while none of them has loaded: health answers, and says what is loading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from retriever_service.http.launch import serve_in_thread
from retriever_service.http.server import create_app
from retriever_service.http.standby import Crew, Standby
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from services.common.http.serving import Manner, RunningServer, bind, run_in_thread, url_of
from tests.retriever.retriever_fixtures import small_index  # noqa: F401
from tests.retriever.retriever_loads import SECONDS, Served, load_on, wait_for

QUERY = "Mina Frost"


def loading(index: Path, may_open: threading.Event) -> RunningServer:
    """A server whose index is not opened before the event."""
    settings = ServerSettings(index=str(index), port=0)

    def open_index() -> Index:
        assert may_open.wait(SECONDS)
        return Index(index)

    def assembled(parts: ExitStack):
        sock = parts.enter_context(closing(bind(settings.host, 0, "shard")))
        return create_app(settings, open_index), sock

    return run_in_thread(assembled, settings.host, "shard", SECONDS, Manner(lifespan="on"))


@pytest.mark.slow
def test_health_answers_while_every_worker_waits_for_a_shard_and_no_request_meets_the_wrong_process(
    small_index,
):
    may_open = threading.Event()
    with ExitStack() as running:
        shard = running.enter_context(loading(small_index, may_open))
        front = running.enter_context(Served("--shards", shard.url, "--workers", 2, "--cache-size", 0))
        http = running.enter_context(httpx.Client(base_url=front.url, trust_env=False, timeout=SECONDS))

        def ready() -> tuple[int, str]:
            with suppress(httpx.TransportError):  # whoever accepts just changes
                answer = httpx.get(f"{front.url}/readyz", trust_env=False, timeout=SECONDS)
                return answer.status_code, answer.text
            return 0, ""

        def waits(reason: str) -> bool:
            status, text = ready()
            return status == 503 and reason in text

        named = f"the index is still loading: 1 shard; shard {shard.url}: "
        wait_for(lambda: waits(f"{named}503 the index is still loading"), "line about the shard")
        assert http.get("/healthz").json() == {"status": "ok"}
        health = http.get("/health").json()
        assert health["index_loaded"] is False and health["loading"].startswith(f"1 shard; shard {shard.url}")
        asked = http.post("/retrieve", json={"queries": [QUERY]})
        assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
        assert http.get("/metrics").status_code == 200
        may_open.set()
        front.ready()
        with load_on(front.url, [QUERY]) as load:  # from the moment that it says it is ready
            load.reaches(40)
        assert load.failures == [] and set(load.answers) == {"d59"}
        # All workers are killed while the shard is away: those in their place load again.
        port = int(shard.url.rpartition(":")[2])
        shard.stop()
        for child in psutil.Process(front.process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                child.kill()
        wait_for(lambda: waits(named), "line about the shard that is away")
        with serve_in_thread(ServerSettings(index=str(small_index), port=port)):
            wait_for(lambda: ready()[0] == 200, "worker that has loaded")
            with load_on(front.url, [QUERY]) as load:
                load.reaches(20)
            assert load.failures == []
        front.end()
        assert front.process.returncode == 143


@pytest.mark.slow
def test_a_stop_while_all_workers_load_ends_everything(small_index):
    with (
        loading(small_index, may_open := threading.Event()) as shard,
        Served("--shards", shard.url, "--workers", 2) as front,
    ):
        wait_for(
            lambda: (
                "503" in httpx.get(f"{front.url}/readyz", trust_env=False, timeout=SECONDS).json()["detail"]
            ),
            "waiting",
        )
        children = psutil.Process(front.process.pid).children()
        front.end()
        assert front.process.returncode == 143
        assert psutil.wait_procs(children, SECONDS)[1] == []
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{front.url}/healthz", trust_env=False, timeout=SECONDS)
        may_open.set()


@contextmanager
def standing_by(crew: Crew, on_ready: Callable[[Standby], None] = lambda standby: None) -> Iterator[str]:
    """The address of a parent whose workers are the files that a test writes."""
    settings = ServerSettings(index="none", port=0)
    with closing(bind(settings.host, 0, "retriever")) as sock:
        manner = Manner(lifespan="off")
        standby = Standby(settings, sock, crew, "an index", manner, lambda url: on_ready(standby))
        with standby:
            yield url_of(settings.host, sock)


def healthy(url: str) -> bool:
    return httpx.get(f"{url}/healthz", trust_env=False, timeout=SECONDS).status_code == 200


def test_a_worker_that_is_ready_before_the_parent_looks_does_not_wait_for_it(tmp_path):
    class Quick(Crew):
        def stand_by(self, on: bool) -> None:
            super().stand_by(on)
            if on:
                (tmp_path / "7.ready").touch()

    told = threading.Event()
    with standing_by(Quick(tmp_path), lambda standby: told.set()):
        assert told.wait(SECONDS)
        assert not (tmp_path / "standby").exists()


def test_the_parent_says_that_it_stands_by_again_when_the_ready_worker_died_at_once(tmp_path):
    class Brief(Crew):
        """Its worker is ready at the second look, and gone at the third."""

        looks = 0

        def any_ready(self) -> bool:
            self.looks += 1
            if self.looks > 3:
                again.set()
            return super().any_ready() if self.looks > 3 else self.looks == 2

    again = threading.Event()
    told = threading.Event()
    with standing_by(Brief(tmp_path), lambda standby: told.set()) as url:
        assert again.wait(SECONDS)
        assert healthy(url) and (tmp_path / "standby").exists()
        (tmp_path / "7.ready").touch()
        assert told.wait(SECONDS)
        assert not (tmp_path / "standby").exists()


def test_the_parent_stands_by_again_when_a_worker_dies_while_it_is_announced(tmp_path):
    announced = []

    def dies(standby: Standby) -> None:
        announced.append((tmp_path / "standby").exists())
        standby.gone(7)
        assert dead.wait(SECONDS)  # the thread that announces is still there

    dead = threading.Event()
    with standing_by(Crew(tmp_path), dies) as url:
        assert healthy(url)
        (tmp_path / "7.ready").touch()
        try:
            wait_for(lambda: announced and (tmp_path / "standby").exists(), "second standby")
            assert healthy(url)
            (tmp_path / "8.ready").touch()
            wait_for(lambda: not (tmp_path / "standby").exists(), "end of the second standby")
        finally:
            dead.set()
    assert announced == [False]
