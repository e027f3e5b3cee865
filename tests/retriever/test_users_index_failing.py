"""A search function of the user's that raises when it is opened: the server is up, and says so."""

import logging

import httpx

from retriever_service.http.launch import serve_in_thread
from retriever_service.settings import ServerSettings

away = [True]


def early(query, topk):
    if away:
        raise ConnectionError("no store")
    return [("Rome\nRome is a town.", 1.0)]


def test_the_opening_call_that_raised_is_logged_and_told_until_one_is_answered(caplog):
    away[:] = [True]
    settings = ServerSettings(index="test_users_index_failing:early", port=0)
    with caplog.at_level(logging.WARNING, "retriever_service"):
        server = serve_in_thread(settings)
    with server, httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:

        def told():
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "ready")
            return ready.json().get("failing")

        line = f"index test_users_index_failing:early: ConnectionError: no store ({__file__}, line "
        (said,) = [r.getMessage() for r in caplog.records if "opening call" in r.getMessage()]
        assert said.startswith(
            f"retriever: the opening call failed, and a search is answered once a call works: {line}"
        )
        assert told() == "the last call of the function failed: ConnectionError", (
            "no token is asked for: no text"
        )
        assert client.get("/health").json()["failing"] == told()
        assert client.post("/retrieve", json={"queries": ["Rome"]}).status_code == 500
        assert told() is not None
        away.clear()
        assert client.post("/retrieve", json={"queries": ["Rome"]}).status_code == 200
        assert told() is None
        away[:] = [True]
        assert client.post("/retrieve", json={"queries": ["Lima"]}).status_code == 500
        assert told() == "the last call of the function failed: ConnectionError"
