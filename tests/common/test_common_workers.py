"""The supervisor of a service's worker processes."""

from types import SimpleNamespace

import pytest
import uvicorn
from uvicorn.supervisors import Multiprocess

from services.common.http.workers import Workers


@pytest.fixture
def workers(monkeypatch):
    """A supervisor of two processes without any process behind them, which replaces each one that died."""
    monkeypatch.setattr(Multiprocess, "__init__", lambda self, config, sockets: None)
    replacements = iter(range(11, 20))

    def replace_dead(self):
        self.processes = [p if p.process.is_alive() else process(next(replacements)) for p in self.processes]

    monkeypatch.setattr(Multiprocess, "keep_subprocess_alive", replace_dead)
    monkeypatch.setattr(Workers, "_answers", lambda self, process: True)
    monkeypatch.setattr(Workers, "_stopping", lambda self: False)
    gone = []
    supervisor = Workers(uvicorn.Config("none:none"), [], gone.append)
    supervisor.processes = [process(1), process(2)]
    supervisor.gone = gone
    return supervisor


def process(pid):
    alive = SimpleNamespace(yes=True)
    return SimpleNamespace(
        pid=pid, process=SimpleNamespace(is_alive=lambda: alive.yes), end=lambda: setattr(alive, "yes", False)
    )


def test_a_worker_that_dies_in_the_first_round_is_told_of(workers):
    workers.processes[0].end()
    workers.keep_subprocess_alive()
    assert workers.gone == [1]


def test_each_dead_worker_is_told_of_once(workers):
    workers.keep_subprocess_alive()
    assert workers.gone == []
    for dead in workers.processes:
        dead.end()
    workers.keep_subprocess_alive()
    workers.keep_subprocess_alive()
    assert sorted(workers.gone) == [1, 2]
