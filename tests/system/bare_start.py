"""A run's start with parts in place of all that is slow in it: no Ray, no files, no services."""

from contextlib import asynccontextmanager

from trainer.session import startup
from trainer.session.own_parts import OwnParts
from trainer.session.startup import Prepared

NO_PARTS = OwnParts(lambda trajectory: 1.0, {})


def bare_start(monkeypatch, *, resources, learner, start_services, pool=None, leave_ray=lambda: None):
    """`startup.start_system` finds its configuration right, a local Ray with these resources, and this
    learner, pool and start of services. Returns it as `start(config, say)`."""

    async def prepared(*arguments):
        return Prepared(None, None, [])

    monkeypatch.setattr(startup, "prepared", prepared)
    monkeypatch.setattr(startup, "connect_ray", lambda say: None)
    monkeypatch.setattr(startup, "leave_ray", leave_ray)
    monkeypatch.setattr(startup, "LearnerGroup", lambda *arguments, **options: learner)
    monkeypatch.setattr(startup, "start_services", start_services)
    monkeypatch.setattr(startup, "_pool", lambda *arguments, **options: pool)
    monkeypatch.setattr(startup, "LOCAL_SECONDS", 0.0)
    monkeypatch.setattr(startup.ray, "cluster_resources", lambda: resources)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    @asynccontextmanager
    async def start(config, say=lambda text: None):
        async with startup.start_system(config, "m", None, say, own=NO_PARTS, identity={}) as system:
            yield system

    return start
