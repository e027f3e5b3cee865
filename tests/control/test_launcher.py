"""Where the services that a run starts itself can be reached."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services import launcher


def test_the_likelihood_service_is_bound_to_loopback_on_a_cluster_of_many_nodes(monkeypatch):
    asked = []
    monkeypatch.setattr(launcher.ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}])
    monkeypatch.setattr(launcher, "_start", lambda cls, name, timeout, *args, **_: asked.append(args))
    launcher.start_likelihood("sqlite:x.db", token_steps=8, name="n")
    assert asked[0][0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "host"),
    [(None, "127.0.0.1"), ("10.0.0.1:6379", "10.0.0.1")],
    ids=["our own Ray", "a cluster"],
)
def test_a_retriever_is_reached_from_nodes_that_join_a_cluster_of_one_later(monkeypatch, address, host):
    asked = []
    monkeypatch.setattr(launcher.ray, "nodes", lambda: [{"Alive": True}])
    monkeypatch.setattr(launcher.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(launcher, "_start", lambda cls, name, timeout, *args, **_: asked.append(args))
    monkeypatch.setenv("RAY_ADDRESS", address or "")
    launcher.start_retriever("index", topk=2, name="n", timeout_seconds=1)
    assert asked[0][0] == host


def test_its_import_loads_no_server():
    """Each actor of a run imports it, and would hold numba and FastAPI for nothing."""
    heavy = ("numba", "fastapi", "torch", "faiss")
    seen = f"import services.launcher, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", seen], text=True) == "[]\n"
