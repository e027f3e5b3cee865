"""Several workers while none of them has loaded: health answers, and says what is loading."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from retriever_service.http.launch import serve_in_thread
from retriever_service.http.server import create_app
from retriever_service.search.index import Index
from retriever_service.settings import ServerSettings
from services.common.http.serving import Manner, RunningServer, bind, run_in_thread
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
            lambda: "503" in httpx.get(f"{front.url}/readyz", trust_env=False).json()["detail"], "waiting"
        )
        children = psutil.Process(front.process.pid).children()
        front.end()
        assert front.process.returncode == 143
        assert psutil.wait_procs(children, SECONDS)[1] == []
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{front.url}/healthz", trust_env=False)
        may_open.set()
