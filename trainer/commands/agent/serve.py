"""`unspiral serve agent`: a trained agent behind OpenAI's chat interface."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from services.agent.agent import Agent
from services.agent.launch import serve_forever
from services.agent.server import ServiceLimits
from services.common.http.auth import required_token
from services.common.processes import signals
from trainer.commands.agent.source import agent_spec


def run_serve_agent(
    checkpoint: str,
    *,
    retriever: str | None,
    overrides: list[str],
    seed: int | None,
    name: str | None,
    host: str,
    port: int,
    running: int,
    waiting: int,
    connections: int,
    say: Callable[[str], None],
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status. Raises what `agent_spec` and `serve_forever`
    raise."""
    required_token(host)  # a mistake is said before gigabytes are copied
    with ExitStack() as parts:
        with signals.raised():
            spec = agent_spec(checkpoint, retriever, overrides, seed, parts, say)
        limits = ServiceLimits(running, waiting, spec.settings.trajectory_timeout_seconds)
        return serve_forever(
            Agent(spec),
            name or spec.name,
            host,
            port,
            limits,
            connections,
            say,
            spec.curves,
            give_back=parts.close,
        )
