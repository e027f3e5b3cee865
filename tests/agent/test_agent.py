"""A trained agent to talk to: the loop of training, watched, and OpenAI's chat interface over it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from itertools import pairwise

import httpx
import pytest
from end_to_end import ENVIRONMENT

from retriever_service.errors import RetrieverUnavailable
from services.agent.agent import Agent
from services.agent.answers import Told
from services.agent.launch import serve_in_thread
from services.agent.server import ServiceLimits
from services.common.errors import EnvironmentLacks, UserError
from services.contracts import Question, TrajectoryRequest
from services.rollout.errors import WorkerLostError
from services.rollout.worker.watching import Observed, Retrieved, Searching, Writing, token_texts
from services.rollout.worker.worker import RolloutWorker
from tests.agent.agent_world import CHAT, FIRST, NAME, QUESTION, StillAgent, spec_of

openai = pytest.importorskip("openai")


# ---- the watched loop


async def test_an_asked_question_gives_the_tokens_of_a_greedy_rollout_in_training(model, search):
    spec = spec_of(model, search.url)
    worker = RolloutWorker(
        "w0", spec.settings, model_path=model, retriever_url=search.url, retriever_timeout_seconds=20
    )
    await worker.start()
    question = Question("q", QUESTION, ("n4",), "lab")
    try:
        trained = await worker.rollout(TrajectoryRequest("000001-0000-00", "g", question, 7, 0.0))
    finally:
        await worker.close()
    agent = Agent(spec)
    await agent.start()
    try:
        asked = await agent.ask(QUESTION, lambda event: None)
    finally:
        await agent.close()
    assert asked.prompt_ids == trained.prompt_ids
    assert [s.token_ids for s in asked.segments] == [s.token_ids for s in trained.segments]
    assert [a.logprobs for a in asked.actions] == [a.logprobs for a in trained.actions]
    assert asked.finish == trained.finish == "answer" and asked.searches == 1


async def test_events_come_in_the_order_in_which_things_happen_and_add_up_to_the_trajectory(model, search):
    agent = Agent(spec_of(model, search.url))
    await agent.start()
    events = []
    try:
        trajectory = await agent.ask(QUESTION, events.append)
    finally:
        await agent.close()
    first, observation, last = trajectory.segments
    kinds = [type(e) for e in events]
    assert kinds[kinds.index(Searching) :][:3] == [Searching, Retrieved, Observed]
    before = events[: kinds.index(Searching)]
    after = events[kinds.index(Observed) + 1 :]
    for written, action in ((before, first), (after, last)):
        assert {type(e) for e in written} == {Writing} and len(written) == len(action.token_ids)
        assert all(a.text.startswith(b.text) for b, a in pairwise(written))
        assert written[-1].text == action.text
    found = events[kinds.index(Retrieved)]
    assert found.query == first.query and [hit.id for hit in found.hits] == first.document_ids
    assert events[kinds.index(Observed)].text == observation.text


async def test_a_limit_on_tokens_ends_the_trajectory_for_length(model, search):
    agent = Agent(spec_of(model, search.url))
    await agent.start()
    try:
        cut = await agent.ask(QUESTION, lambda event: None, most_tokens=2)
        assert cut.finish == "length" and len(cut.actions[0].token_ids) == 2
        whole = await agent.ask(QUESTION, lambda event: None, most_tokens=100)
        assert whole.finish == "answer"
        with pytest.raises(UserError, match="max_model_tokens=128"):
            await agent.ask(QUESTION * 40, lambda event: None)
    finally:
        await agent.close()


def test_texts_of_tokens_join_to_the_text_of_all():
    pieces = {1: b"a", 2: b" b", 3: "\u20ac".encode()[:1], 4: "\u20ac".encode()[1:], 5: b"\xff"}

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode("utf-8", "replace")

    for ids in ([1, 2, 3, 4, 1], [3, 4], [1, 3], [], [5, 1, 2]):
        texts = token_texts(ids, decode)
        assert len(texts) == len(ids) and "".join(texts) == decode(ids)
    assert token_texts([1, 3, 4, 2], decode) == ["a", "", "\u20ac", " b"]


def test_deltas_hold_the_answer_back_from_the_reasoning_and_lose_nothing():
    """The text before the answer is given out at once, but for what an answer's tag may begin in."""
    told = Told()
    given = []
    text = "a <ans b </answer> <answer> c </search>"
    for end in range(1, len(text) + 1):
        given += [d["reasoning_content"] for d in told.deltas(Writing(text[:end]))]
    assert "".join(given) == "a <ans b </answer> "
    given += [d["reasoning_content"] for d in told.deltas(Searching("q"))]
    assert "".join(given) == text


# ---- the service


@pytest.fixture(scope="module")
def service():
    agent = StillAgent()
    with serve_in_thread(agent, NAME, ServiceLimits(running=1, waiting=1, wait_seconds=20)) as running:
        with httpx.Client(base_url=running.url, trust_env=False, timeout=30) as client:
            yield agent, client


@pytest.fixture
def still(service):
    service[0].reset()
    return service[0]


@pytest.fixture
def served(service, still):
    return service[1]


OMITTED = object()
"""In place of a field's value."""


def post(client, **fields):
    body = json.loads(CHAT) | fields
    return client.post(
        "/v1/chat/completions", json={name: value for name, value in body.items() if value is not OMITTED}
    )


def test_a_completion_holds_the_answer_the_reasoning_and_each_search(served, still):
    answer = post(served, logprobs=True, temperature=0.5, max_tokens=90, max_completion_tokens=70).json()
    assert still.asked == [("who wrote Hamlet?", 0.5, 70)]
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Shakespeare"
    assert choice["message"]["reasoning_content"] == FIRST + "\n<think> found </think> "
    assert choice["message"]["searches"] == [
        {
            "id": "search_1",
            "type": "function",
            "function": {"name": "search", "arguments": '{"query": "Hamlet"}'},
            "documents": [
                {"id": "d1", "title": "Hamlet", "text": "a play by <b>Shakespeare</b>", "score": 2.5}
            ],
            "seconds": 0.25,
        }
    ]
    assert choice["finish_reason"] == "stop"
    tokens = choice["logprobs"]["content"]
    assert [(t["token"], t["logprob"]) for t in tokens] == [(" t1", -0.5), (" t2", -0.25), (" t6", -0.125)]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    turns = [{"kind": "search", "tokens": 2, "searches": 1}, {"kind": "answer", "tokens": 1, "searches": 0}]
    assert answer["unspiral"] == {"finish": "answer", "searches": 1, "seconds": 1.5, "turns": turns}
    counted = served.get("/metrics").text
    assert 'unspiral_agent_questions_total{finish="answer"}' in counted
    assert "unspiral_agent_tokens_total" in counted and "unspiral_agent_running 0.0" in counted


def test_a_stream_adds_up_to_the_completion(served):
    whole = post(served).json()["choices"][0]
    answer = post(served, stream=True, logprobs=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len({c["id"] for c in chunks}) == 1 and chunks[-1]["usage"]["total_tokens"] == 8
    deltas = [c["choices"][0]["delta"] for c in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    for field in ("content", "reasoning_content"):
        assert "".join(d.get(field, "") for d in deltas) == whole["message"][field]
    assert [s for d in deltas for s in d.get("searches", ())] == whole["message"]["searches"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-2:] == [None, "stop"]
    assert len(chunks[-3]["choices"][0]["logprobs"]["content"]) == 3


@pytest.mark.parametrize(
    ("fields", "status", "param", "says"),
    [
        ({"model": "gpt-4"}, 404, "model", NAME),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages", "role user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages.0.content.0.type",
            "'text'",
        ),
        ({"n": 2}, 400, "n", "less than or equal to 1"),
        ({"tools": [{}]}, 400, "tools", "at most 0"),
        ({"top_p": 0.5}, 400, "top_p", "greater than or equal to 1"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"temperature": "hot"}, 400, "temperature", "valid number"),
        ({"model": OMITTED}, 400, "model", f"model: is missing; expected '{NAME}', the one that is served"),
        ({"messages": OMITTED}, 400, "messages", "messages: is missing"),
        ({"messages": OMITTED, "message": []}, 400, "message", "unknown field; did you mean messages?"),
        ({"temprature": 1}, 400, "temprature", "unknown field; did you mean temperature?"),
        ({"messages": [{"content": "x"}]}, 400, "messages.0.role", "messages.0.role: is missing"),
    ],
)
def test_a_mistake_is_an_error_object_of_openai_and_asks_nothing(served, still, fields, status, param, says):
    answer = post(served, **fields)
    error = answer.json()["error"]
    assert answer.status_code == status and says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert still.asked == []


def test_fields_of_other_servers_are_passed_over(served):
    others = {
        "top_k": 20, "min_p": 0.1, "min_tokens": 1, "seed": 3, "user": "me", "store": False, "metadata": {},
        "tool_choice": "none", "function_call": "none", "parallel_tool_calls": True, "service_tier": "auto",
        "repetition_penalty": 1.0, "stop_token_ids": [], "best_of": 1, "echo": False, "prediction": None,
    }  # fmt: skip
    assert post(served, **others).status_code == 200


def test_errors_of_the_gate_and_of_routes_are_error_objects_too(served):
    foreign = served.get("/v1/models", headers={"Host": "evil.example"})
    assert (foreign.status_code, foreign.json()["error"]["param"]) == (403, "host")
    unknown = served.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, None)
    assert served.post("/v1/chat/completions", content=b"{").json()["error"]["param"] == "body"
    with httpx.Client(trust_env=False) as client:
        large = client.post(served.base_url.join("/v1/chat/completions"), content=b" " * (1 << 20) + CHAT)
    assert large.status_code == 413 and "1048576" in large.json()["error"]["message"]


def test_earlier_messages_are_not_asked(served, still):
    turns = [
        ("system", "be brief"),
        ("user", "first"),
        ("assistant", "x"),
        ("user", [{"type": "text", "text": "b"}]),
    ]
    assert post(served, messages=[{"role": r, "content": c} for r, c in turns]).status_code == 200
    assert still.asked == [("b", 0.0, None)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_search_is_a_503_and_a_fault_of_ours_tells_no_file(served, still, stream):
    for fault, status, says in (
        (RetrieverUnavailable("retriever at http://r: no answer"), 503, "retriever at http://r"),
        (ValueError("/secret/file"), 500, "internal error: ValueError"),
    ):
        still.fault = fault
        with httpx.Client(base_url=served.base_url, trust_env=False) as client:  # a 500 ends its connection
            answer = post(client, stream=stream)
        if stream:  # it has begun
            last = answer.text.strip().split("\n")[-1].removeprefix("data: ")
            error = json.loads(last)["error"]
            assert answer.status_code == 200
        else:
            error = answer.json()["error"]
            assert answer.status_code == status
        assert error["type"] == "server_error" and says in error["message"]
        assert "secret" not in answer.text
    until(lambda: "unspiral_agent_running 0.0" in served.get("/metrics").text)


def until(condition, seconds=60):
    """Wait for what another thread's loop brings about."""
    done = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        done.wait(0.02)
    raise AssertionError("it did not come about")


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_the_places_a_429_and_a_client_that_leaves_gives_its_place_back(served, still, stream):
    still.hold = asyncio.Event()  # never set: such questions end with their clients alone
    body = json.dumps(json.loads(CHAT) | {"stream": stream}).encode()
    leaving = []
    for n in (1, 2):
        # Raw, so that it can leave without having read an answer.
        sock = socket.create_connection((served.base_url.host, served.base_url.port), timeout=60)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        leaving.append(sock)
        until(lambda n=n: still.running and f"_waiting {n - 1:.1f}" in served.get("/metrics").text)
    refused = post(served)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    for sock in leaving:
        sock.close()
    still.hold = None
    until(lambda: "unspiral_agent_running 0.0" in served.get("/metrics").text)
    assert post(served).status_code == 200 and still.running == 0


def test_after_its_engine_has_died_an_agent_is_not_ready():
    dead = StillAgent()
    dead.fault = WorkerLostError("dead")
    with serve_in_thread(dead, NAME) as running:
        with httpx.Client(base_url=running.url, trust_env=False, timeout=30) as client:
            answer = post(client)
            assert answer.status_code == 503 and "its service ends" in answer.json()["error"]["message"]
            assert client.get("/readyz").status_code == 503 and client.get("/healthz").status_code == 200


def test_an_agent_that_does_not_load_is_told_to_whoever_starts_the_service():
    still = StillAgent()

    async def fails():
        raise EnvironmentLacks("no GPU")

    still.start = fails
    with pytest.raises(EnvironmentLacks, match="no GPU"):
        serve_in_thread(still, NAME)
    assert still.closed


def test_a_signal_while_the_model_loads_ends_the_process_at_once_and_gives_back_what_is_held(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path / "given_back")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout.splitlines()[-1] == "agent: stopped by SIGTERM while the model was loading"
    assert (tmp_path / "given_back").exists()


LOADING = """
import asyncio, os, pathlib, signal, sys, time
from services.agent.launch import serve_forever
from services.agent.server import ServiceLimits
from tests.agent.agent_world import StillAgent

def library():  # a call that cannot be cancelled, in a thread that Python's end waits for
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3600)

class Loading(StillAgent):
    async def start(self):
        await asyncio.to_thread(library)

held = pathlib.Path(sys.argv[1])
say = lambda line: print(line, flush=True)
sys.exit(serve_forever(Loading(), "m", "127.0.0.1", 0, ServiceLimits(), 10, say, give_back=held.touch))
"""


# ---- stock clients and a real engine


def test_curl_and_a_stock_openai_client_talk_to_a_tiny_model(model, search):
    with serve_in_thread(Agent(spec_of(model, search.url)), "tiny") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [m.id for m in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": QUESTION}]
        whole = client.chat.completions.create(model="tiny", messages=messages, logprobs=True)
        message = whole.choices[0].message
        assert message.content.startswith("n") and whole.choices[0].finish_reason == "stop"
        (searched,) = message.model_extra["searches"]
        assert json.loads(searched["function"]["arguments"])["query"] == search.queries[-1]
        assert searched["documents"][0]["text"] == "born n3 river n4"
        written = [t.token for t in whole.choices[0].logprobs.content]
        assert len(written) == whole.usage.completion_tokens
        assert "</answer>" in "".join(written)
        content = reasoning = ""
        with client.chat.completions.create(model="tiny", messages=messages, stream=True) as stream:
            for chunk in stream:
                content += chunk.choices[0].delta.content or ""
                reasoning += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        assert (content, reasoning) == (message.content, message.model_extra["reasoning_content"])
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=messages, n=2)
        assert caught.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4", messages=messages)
        body = json.dumps({"model": "tiny", "messages": messages})
        words = ["curl", "-sS", "--noproxy", "*", "--max-time", "60", f"{running.url}/v1/chat/completions"]
        words += ["-H", "content-type: application/json", "-d", body]
        said = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True).stdout
        assert json.loads(said)["choices"][0]["message"]["content"] == message.content
