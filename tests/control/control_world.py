"""A control plane without a run behind it."""

from __future__ import annotations

from services.common.errors import EnvironmentLacks, UserError
from services.control.records import Done, RunStatus, WorkerStatus


class Run:
    """A control that remembers what it was asked."""

    def __init__(self):
        self.asked = []

    async def ready(self):
        if self.asked == ["away"]:
            raise EnvironmentLacks("the run does not answer", status=504)

    async def status(self):
        worker = WorkerStatus(
            id="w0.1", node="n", pid=7, state="ready", version=3, outstanding_tokens=5, trajectories=2
        )
        return RunStatus(
            state="running", run="r", step=4, steps=9, target=2, workers=[worker], rewards=[0.5, None]
        )

    async def scale(self, n, ahead):
        if n == 99 and not ahead:
            raise EnvironmentLacks("99 rollout workers ask for CPU 99; the cluster has CPU 2", status=409)
        self.asked.append(("scale", n))
        return Done(text=f"{n} workers wanted", target=0 if n == "all" else n)

    async def drain(self, worker):
        if worker != "w0.1":
            raise UserError(f"no worker {worker}; there are w0.1", status=404)
        self.asked.append(("drain", worker))
        return Done(text=f"{worker} drains")

    async def pause(self):
        self.asked.append("pause")
        return Done(text="pauses")

    async def resume(self):
        self.asked.append("resume")
        return Done(text="goes on")
