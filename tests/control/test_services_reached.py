"""What a run's status says of the services that it uses: whether they can serve, not whether they are up."""

import asyncio
import json
import threading

import pytest
from made_server import Quiet, serving
from ports import kept_port

from services.control.records import Reach
from trainer.session import control
from trainer.session.control import reach


class Service(Quiet):
    """Up, with an answer to /readyz of the test's own."""

    status = 200
    body: object = None

    def do_GET(self):
        ready = self.path == "/readyz"
        self.answer(self.status if ready else 200, json.dumps(self.body).encode())


@pytest.mark.parametrize(
    ("status", "detail", "problem"),
    [
        (200, "", None),
        (404, "Not Found", None),  # Search-R1's own server has no health route
        (503, "likelihood store redis at h:1/0: Error 111", "503 likelihood store redis at h:1/0: Error 111"),
    ],
)
def test_a_service_that_is_up_is_reachable_where_it_can_serve(monkeypatch, status, detail, problem):
    monkeypatch.setattr(Service, "status", status)
    monkeypatch.setattr(Service, "body", {"detail": detail})
    with serving(Service) as url:
        assert asyncio.run(reach(url + "/")) == Reach(
            url=url + "/", reachable=problem is None, problem=problem
        )


def test_a_service_that_hangs_is_told_from_one_that_is_away(monkeypatch):
    monkeypatch.setattr(control, "REACH_SECONDS", 0.2)
    over = threading.Event()

    class Hangs(Quiet):
        def do_GET(self):
            over.wait(60)

    with serving(Hangs) as url:
        try:
            assert asyncio.run(reach(url)).problem == "no answer within 0.2 s"
        finally:
            over.set()
    away = asyncio.run(reach(f"http://127.0.0.1:{kept_port()}"))
    assert not away.reachable and away.problem == "All connection attempts failed"
