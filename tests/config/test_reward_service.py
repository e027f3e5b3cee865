"""A reward that asks a service, as docs/extend.md shows it: what a run gets from it in each case."""

import asyncio
import json
import math
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from examples.extend import judge
from places import ROOT

from services.common.errors import UserError
from services.contracts import Action, Question, Trajectory
from trainer.config.schema import parse_config
from trainer.loop.rollouts.sampling import BatchSampler
from trainer.rewards import make_reward
from trainer.rewards.calls import RewardCalls

PATH = "examples.extend.judge:judged"
SAID = {
    "Rome": (200, b'{"score": 0.75}'),
    "Lima": (503, b"busy"),
    "Bern": (200, b'{"verdict": "good"}'),
    "Oslo": (200, b'{"score": NaN}'),
}


def answering(text):
    question = Question("q", "where?", ("Rome",), "nq")
    return Trajectory("u7", "g", question, [1], [Action([1], [-0.5], 0, "answer", text)], "answer")


@pytest.fixture
def service(monkeypatch):
    """The judge, on a port of its own. It never answers about Hull, until the test is over."""
    over = threading.Event()
    asked = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            if body["answer"] == "Hull":
                over.wait(30)
                return
            status, said = SAID[body["answer"]]
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        monkeypatch.setattr(judge, "CLIENT", client)
        yield asked
    over.set()
    server.shutdown()
    server.server_close()


def of(text):
    return make_reward(PATH)(answering(f"<answer> {text} </answer>"))


def test_the_score_is_that_of_the_service_and_no_answer_asks_nobody(service):
    assert of("Rome") == 0.75
    assert service == [("/judge", {"question": "where?", "answer": "Rome"})]
    assert make_reward(PATH)(answering("I do not know")) == 0.0 and len(service) == 1


def test_a_judge_that_is_busy_hangs_or_is_away_leaves_the_trajectory_out(service, monkeypatch):
    assert of("Lima") is None
    with httpx.Client(base_url=judge.CLIENT.base_url, timeout=1.0, trust_env=False) as hasty:
        monkeypatch.setattr(judge, "CLIENT", hasty)
        assert of("Hull") is None
    with httpx.Client(base_url="http://127.0.0.1:1", timeout=60.0, trust_env=False) as nobody:
        monkeypatch.setattr(judge, "CLIENT", nobody)
        assert of("Rome") is None


def test_nan_is_no_score_and_an_answer_without_one_ends_the_run_in_one_line(service):
    assert math.isnan(of("Oslo"))
    with pytest.raises(
        UserError, match=r"judge:judged': on trajectory u7: KeyError: 'score' \(.*line \d+\)"
    ) as e:
        of("Bern")
    assert "\n" not in str(e.value)


def test_a_batch_is_scored_one_after_the_other_in_one_thread_and_none_is_nan():
    begun = []
    lasting = threading.Lock()

    def reward(trajectory):
        assert lasting.acquire(blocking=False), "two calls at once"
        begun.append(threading.get_ident())
        lasting.release()
        return (None, math.nan, math.inf, 0.5)[len(begun) - 1]

    raw = {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"corpus": "c"}}
    sampler = BatchSampler(parse_config(raw), None, None, reward)
    earned = asyncio.run(sampler.calls.of([answering("x")] * 4))
    assert [math.isfinite(value) for value in earned] == [False, False, False, True] and earned[3] == 0.5
    assert len(set(begun)) == 1 and begun[0] != threading.get_ident()


HANGS = """
import asyncio, sys, threading
from types import SimpleNamespace
from trainer.rewards.calls import RewardCalls
calls = RewardCalls(lambda t: threading.Event().wait(), "my.judge:judged", 0.5)
try:
    asyncio.run(calls.of([SimpleNamespace(uid="u7")]))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_call_that_hangs_is_an_error_that_names_it_and_keeps_no_process_from_its_end():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    end = "no result within reward.timeout_seconds=0.5"
    assert done.stdout == f"UserError reward.kind 'my.judge:judged': on trajectory u7: {end}\n", done.stderr
    assert done.returncode == 0


def test_the_call_in_hand_is_named_and_none_follows_one_that_nobody_waits_for():
    begun, free = threading.Event(), threading.Event()
    asked = []

    def reward(trajectory):
        asked.append(trajectory.uid)
        begun.set()
        assert free.wait(60)
        return 1.0

    calls = RewardCalls(reward, "m:judge", 600.0)

    async def run():
        task = asyncio.create_task(calls.of([answering("x")] * 3))
        assert await asyncio.to_thread(begun.wait, 60)
        assert re.fullmatch(
            r"reward.kind 'm:judge' on trajectory u7 for \d+ s \(0 of 3 done\)", calls.waits_for()
        )
        assert calls.returned == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        free.set()
        assert await calls.of([answering("x")]) == [1.0]

    asyncio.run(run())
    assert calls.waits_for() == "" and (calls.returned, len(asked)) == (2, 2)


def test_a_function_that_is_called_no_more_is_let_go_of():
    threads = []

    def reward(trajectory):
        threads.append(threading.current_thread())
        return 1.0

    calls = RewardCalls(reward, "m:judge", 600.0)
    assert asyncio.run(calls.of([answering("x")])) == [1.0]
    calls.close()
    calls.close()
    threads[0].join(60)
    assert not threads[0].is_alive()
    assert asyncio.run(calls.of([answering("x")])) == [1.0]  # as where it is asked once more
    calls.close()
    threads[1].join(60)
    assert not threads[1].is_alive()


def test_a_judge_that_refuses_us_ends_the_run_in_one_line(service, monkeypatch):
    for status, kind in ((401, "HTTPStatusError"), (404, "HTTPStatusError"), (422, "HTTPStatusError")):
        monkeypatch.setitem(SAID, "Lima", (status, b"no"))
        with pytest.raises(UserError, match=rf"on trajectory u7: {kind}: Client error '{status} ") as e:
            of("Lima")
        assert "\n" not in str(e.value)
    for status in (429, 500, 504):
        monkeypatch.setitem(SAID, "Lima", (status, b"later"))
        assert of("Lima") is None
    keyless = {"Authorization": "Bearer "}  # of a variable that is not set
    with httpx.Client(base_url=judge.CLIENT.base_url, headers=keyless, trust_env=False) as client:
        monkeypatch.setattr(judge, "CLIENT", client)
        with pytest.raises(UserError, match=r"LocalProtocolError: Illegal header value"):
            of("Rome")
