"""A run of trajectories over a retriever that answers oddly: none is falsified, none is lost. Real actors,
real engine, real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter

import pytest
from made_server import Quiet, serving
from pool_world import cluster, events_of, policy, pool, requests  # noqa: F401
from test_retriever_answers import ODD

from retriever_service.client import RetrieverUnavailable

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.ray]
GOOD = '"n7"\nborn n3 river n4'
SEEN = "<information> <doc> n7 born n3 river n4 </information>"
LENIENT = {
    "no id and no score": b'{"document": {"contents": %b}}',
    "bare": b'{"id": 5, "contents": %b}',
    "score NaN": b'{"document": {"id": "d", "contents": %b}, "score": NaN}',
    "score null": b'{"document": {"id": "d", "contents": %b}, "score": null}',
    "a bad hit beside it": (
        b'{"document": {"id": "x", "contents": null}}, {"document": {"id": "d", "contents": %b}}'
    ),
}


class Odd:
    """Gives each odd answer in turn, each for a while: for `times` requests. `answers` and `stays` are for
    the test to set."""

    def __init__(self, times: int = 3):
        self.times, self.stays, self.lock = times, None, threading.Lock()
        self.reset()

    def reset(self):
        self.given: Counter[str] = Counter()

    def next(self) -> tuple[str, tuple]:
        with self.lock:
            names = [*ODD, *LENIENT]
            name = self.stays or next((n for n in names if self.given[n] < self.times), "good")
            self.given[name] += 1
        if name in ODD:
            return name, ODD[name]
        hit = (
            LENIENT.get(name, b'{"document": {"id": "d", "contents": %b}, "score": 1}')
            % json.dumps(GOOD).encode()
        )
        return name, (200, b'{"result": [[' + hit + b"]]}", {})


@pytest.fixture(scope="module")
def odd():
    state = Odd()

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            _, (status, body, headers) = state.next()
            self.answer(status, body, headers)

    with serving(Handler) as state.url:
        yield state


async def test_each_odd_answer_for_a_while_falsifies_and_loses_no_trajectory(cluster, policy, odd):
    asked = requests("odd", 20)
    async with pool(policy.path, odd.url, retriever_timeout=60) as p:
        await p.start()
        for _ in range(20):  # until each kind of answer has had its while
            done = await p.rollout(asked)
            assert [t.uid for t in done] == [r.uid for r in asked]
            for t in done:
                assert t.finish == "answer" and t.searches >= 1
                observations = [s.text for s in t.segments[1::2]]
                assert observations == [SEEN] * t.searches, (
                    "what the model is shown is what the retriever has"
                )
                assert all(len(a.document_ids) == 1 for a in t.actions if a.document_ids is not None)
            if odd.given["good"]:
                break
        assert all(odd.given[name] == odd.times for name in (*ODD, *LENIENT)), odd.given
        assert events_of(p, "worker_lost") == []
        async with asyncio.timeout(60):
            while not events_of(p, "hits_left_out"):
                await asyncio.sleep(0.1)
    assert {e["worker"] for e in events_of(p, "hits_left_out")} == {"w0.1"}
    assert sum(e["hits"] for e in events_of(p, "hits_left_out")) == odd.times


async def test_an_odd_answer_that_stays_ends_the_rollout_in_one_line(cluster, policy, odd, monkeypatch):
    monkeypatch.setattr("services.rollout.pool.membership.FIRST_BACK_OFF_SECONDS", 0.01)
    odd.stays = "a page with 200"
    try:
        async with pool(policy.path, odd.url, retriever_timeout=3) as p:
            await p.start()
            with pytest.raises(
                RetrieverUnavailable, match=f"^retriever at {odd.url}: no usable answer within"
            ) as error:
                await p.rollout(requests("stays", 4))
            retries = events_of(p, "trajectory_retry")
    finally:
        odd.stays = None
    assert error.value.exit_code == 3 and "\n" not in str(error.value)
    # Four searches at once on a busy machine: the last answer may also be one that did not come.
    lacks = re.compile(f"retriever at {re.escape(odd.url)}: no (usable )?answer within 3 s")
    assert retries and all(lacks.search(e["reason"]) for e in retries), retries
