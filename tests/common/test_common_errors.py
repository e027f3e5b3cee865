"""What an error tells a command, a service and another process; and modules that are imported late."""

from __future__ import annotations

import copy
import pickle

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from services.common.errors import EnvironmentLacks, UnspiralError, UserError, explains
from services.common.http.faults import install_faults
from services.common.loading.lazy import LazyModule
from services.common.processes.signals import Stopped
from services.control.records import no_run
from services.rollout.errors import WorkerLostError
from services.weight_sync import WeightSyncError
from trainer.commands.cli import line_of
from trainer.learner.group import LearnerError, no_room


@pytest.mark.parametrize("kind", [UnspiralError, FloatingPointError, WorkerLostError, RuntimeError])
def test_a_fault_of_ours_keeps_its_traceback(kind):
    assert line_of(kind("the engine returned 5 tokens with 4 log-probs")) is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("x"), 2),
        (EnvironmentLacks("x"), 3),
        (no_run("x"), 3),
        (WeightSyncError("x"), 1),
        (LearnerError("x"), 1),
        (no_room("x"), 3),
        (UnspiralError("x", explained=True), 1),
        (UnspiralError("x", exit_code=4, explained=True), 4),
    ],
)
def test_what_a_line_explains_is_one_line(error, status):
    assert line_of(error) == ("x", status)


def test_an_error_of_another_family_that_has_an_exit_status_is_one_line():
    assert explains(Stopped(15)) and line_of(Stopped(15))[1] == 143
    assert not explains(ValueError("x"))


def test_an_override_is_pickled_and_its_cause_has_it_behind_ray():
    error = UserError("no such worker", status=404)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.status, again.exit_code, UserError.status) == ("no such worker", 404, 2, 422)
    exceptions = pytest.importorskip("ray.exceptions")
    raised = exceptions.RayTaskError("f", "traceback", again).as_instanceof_cause()
    assert isinstance(raised, UserError) and explains(raised)
    assert (raised.status, raised.cause.status) == (422, 404)


def test_a_service_shows_what_a_line_explains_and_no_fault_of_its_own():
    refused = []
    app = FastAPI()
    install_faults(app, refused.append)

    @app.get("/{kind}")
    async def fails(kind: str) -> None:
        raise WorkerLostError("w1: /srv/secret") if kind == "ours" else UserError("wrong", status=409)

    with TestClient(app, raise_server_exceptions=False) as client:
        ours, wrong = client.get("/ours"), client.get("/wrong")
    assert (ours.status_code, ours.json()) == (500, {"detail": "internal error: WorkerLostError"})
    assert (wrong.status_code, wrong.json()) == (409, {"detail": "wrong"})
    assert refused == [500, 409]


def test_a_module_that_is_imported_late_can_be_copied_and_pickled():
    lazy = LazyModule("math")
    assert lazy.sqrt(4) == copy.copy(lazy).sqrt(4) == pickle.loads(pickle.dumps(lazy)).sqrt(4) == 2
    assert not hasattr(lazy, "_private")
