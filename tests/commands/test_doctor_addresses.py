"""What `doctor --config` says of services by their addresses: as a run would find them."""

import json

import pytest
from made_server import Quiet, serving
from ports import kept_port
from redis_server import RedisServer

from trainer.commands.checks.doctor_addresses import check_address, check_retriever, check_services
from trainer.config.schema import parse_config

BASE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "run": {"name": "r"}}


class Service(Quiet):
    """Up, with a status of /readyz of the test's own."""

    status = 200
    found: object = {"result": [[{"document": {"id": "a", "contents": "text"}, "score": 1.0}]]}

    def do_GET(self):
        self.answer(self.status if self.path == "/readyz" else 200, json.dumps({}).encode())

    def do_POST(self):
        self.answer(200, json.dumps(self.found).encode(), {"content-type": "application/json"})


@pytest.mark.parametrize(
    ("status", "level", "advice"),
    [
        (200, "good", ""),
        (404, "good", ""),  # Search-R1's own server has no health route
        (501, "good", ""),  # a handler of http.server that knows POST alone
        (405, "good", ""),
        (503, "note", "is up and not ready: Service Unavailable; a run waits for it"),
        (401, "bad", "does not answer from here: Unauthorized"),
    ],
)
def test_a_service_is_well_where_it_can_serve(monkeypatch, status, level, advice):
    monkeypatch.setattr(Service, "status", status)
    with serving(Service) as url:
        found = check_address("retriever.url", url + "/")
    assert (found.level, found.advice) == (level, advice)


@pytest.mark.parametrize(
    ("found", "level", "said"),
    [
        (Service.found, "good", "1 passage of 'capital of Malta?'"),
        ({"result": [[]]}, "note", "none for the first question of the run"),
        ([["text"]], "bad", "expected a server that answers POST /retrieve"),
        ({"results": Service.found["result"]}, "bad", "expected a server that answers POST /retrieve"),
        ({"result": []}, "bad", "expected a server that answers POST /retrieve"),
    ],
)
def test_a_retriever_is_searched_once_and_its_answer_judged(monkeypatch, found, level, said):
    monkeypatch.setattr(Service, "found", found)
    with serving(Service) as url:
        told = check_retriever("retriever.url", url, "capital of Malta?", 3, 2.0)
    assert told.level == level and said in f"{told.seen} {told.advice}"


def test_the_held_out_questions_retriever_and_a_redis_are_looked_at(tmp_path):
    gone = f"http://127.0.0.1:{kept_port()}"
    redis = RedisServer(tmp_path / "redis")

    def levels():
        with serving(Service) as url:
            config = parse_config(
                BASE
                | {
                    "retriever": {"url": url},
                    "evaluation": {"retriever": {"url": gone}},
                    "store": {
                        "url": redis.url.replace("//", "//:secret@") if redis.process.poll() else redis.url
                    },
                }
            )
            found = list(check_services(config))
        assert not any("secret" in f"{f.seen} {f.advice}" for f in found)
        return [(f.what, f.level) for f in found]

    services = [("retriever.url", "good"), ("evaluation.retriever.url", "bad")]
    try:
        assert levels() == [*services, ("store.url", "good")]
    finally:
        redis.kill()
    assert levels() == [*services, ("store.url", "bad")]
