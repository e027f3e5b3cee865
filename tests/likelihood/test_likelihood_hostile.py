"""What a hostile or broken trainer sends to the likelihood service: refused by name, at a bounded cost, and
never for ever."""

from __future__ import annotations

import errno
import io
import json
import logging
import random
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import httpx
import numpy as np
import psutil
import pytest
from likelihood_service import client, store  # noqa: F401
from made_server import Quiet, serving

from services.common.errors import EnvironmentLacks, UserError
from services.common.http.bodies import Memory, Room
from services.contracts import TokenBatch
from services.likelihood import client as client_module
from services.likelihood.client import LikelihoodClient
from services.likelihood.records import EventRecord, StepRecord, parsed
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from services.likelihood.spool import Spool
from services.likelihood.wire.tokens import pack_tokens, unpack_tokens

MIB = 1 << 20


def columns(**changes):
    held = {
        "uid": np.array(["a", "b"]),
        "offsets": np.array([0, 2, 3]),
        "token_ids": np.arange(3, dtype=np.int32),
        "action_ids": np.array([-1, 0, 0], np.int16),
        "logp_old": np.array([0, -1, -2], np.float32),
    }
    return {name: value for name, value in (held | changes).items() if value is not None}


def npz(compressed=False, **changes):
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, **columns(**changes))
    return out.getvalue()


def test_damaged_token_arrays_are_refused_and_never_break_anything():
    rng, whole = random.Random(0), [npz(), npz(compressed=True)]
    counts = {"kept": 0, "refused": 0}
    for _ in range(3000):
        body = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.1:
            del body[rng.randrange(len(body)) :]
        try:
            unpack_tokens(bytes(body))
            counts["kept"] += 1
        except UserError as error:
            assert str(error).startswith("token arrays: ") and "\n" not in str(error)
            counts["refused"] += 1
    assert counts["refused"] > 2000


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"token_ids": np.array([0, 1, 2**31])},
            "token_ids: 2147483648; whole numbers from -2147483648 to 2147483647",
        ),
        ({"token_ids": np.array([0, 1, -(2**40)])}, "token_ids: -1099511627776; whole numbers"),
        ({"action_ids": np.array([0, 0, 40_000])}, "action_ids: 40000; whole numbers from -32768 to 32767"),
        (
            {"offsets": np.array([0, 2, 2**64 - 1], np.uint64)},
            "offsets: 18446744073709551615; whole numbers from 0 to 3",
        ),
        ({"uid": np.array([b"\xff", b"b"])}, "uid: expected text"),
        ({"logp_sampler": np.zeros(2, np.float32)}, "logp_sampler: expected 3 floating numbers"),
        ({"x": np.zeros((2, 2))}, "x: expected one dimension of booleans, numbers or strings"),
        ({"x": np.array([1j, 2j])}, "x: expected one dimension"),
        ({"x": np.array([None, 1])}, "x: expected one dimension of booleans, numbers or strings, got object"),
        ({f"x{i}": np.zeros(2) for i in range(70)}, "75 arrays; at most 64 accepted"),
    ],
)
def test_arrays_that_would_wrap_or_cost_are_refused_by_name(client, changes, says):
    answer = client.put("/v1/runs/run/steps/0/tokens", content=npz(**changes))
    assert answer.status_code == 422 and says in answer.json()["detail"]
    assert client.get("/v1/runs").json() == []


def claiming(shape: str, name: str = "token_ids", kind: str = "<i4") -> bytes:
    """An archive in which one array says that it has this shape, and holds nothing."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    out = io.BytesIO(npz(**{name: None}))
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr(f"{name}.npy", array)
    return out.getvalue()


def test_claimed_sizes_and_bombs_are_refused_before_they_cost_memory(client):
    bomb = npz(compressed=True, x=np.zeros(400 * MIB // 8))
    assert len(bomb) < MIB
    memory = psutil.Process().memory_info().rss
    for body, says in (
        (bomb, "bytes when unpacked; at most"),
        (claiming("(2305843009213693951,)"), "token_ids: 9223372036854775804 bytes claimed, 128 there"),
        (claiming("(-1,)"), "token_ids: -4 bytes claimed"),
        (claiming("(10**30,)"), "expected an npz body"),
        (claiming("(1000000000,)", "uid", "<U0"), "uid: 1000000000 strings of no width"),
        (claiming("(1000000000,)", "x", "|S0"), "x: 1000000000 strings of no width"),
    ):
        answer = client.put("/v1/runs/run/steps/0/tokens", content=body)
        assert answer.status_code == 422 and says in answer.json()["detail"], answer.json()
    assert psutil.Process().memory_info().rss - memory < 50 * MIB


def test_honest_arrays_pass_packed_or_not():
    batch = TokenBatch(
        [f"run-{i}" for i in range(500)],
        np.arange(501) * 400,
        np.zeros(200_000, np.int32),
        np.zeros(200_000, np.int16),
        logp_old=np.full(200_000, -0.5, np.float32),
    )
    for body in (pack_tokens(batch), npz(compressed=True)):
        assert len(unpack_tokens(body)) in (500, 2)
    packed = io.BytesIO()
    np.savez_compressed(packed, **dict(np.load(io.BytesIO(pack_tokens(batch)))))
    assert len(unpack_tokens(packed.getvalue())) == 500


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (f'{{"x": {2**70}}}', "data: integer of 71 bits; at most 64 bits accepted"),
        (f'{{"x": [{{"y": -{10**40}}}]}}', "data: integer of 133 bits"),
        ('{"x": ' + "[" * 60 + "1" + "]" * 60 + "}", "data: nested too deep; at most 32 levels accepted"),
    ],
)
def test_event_data_that_no_store_can_write_is_a_422(client, data, says):
    body = f'{{"step": 0, "kind": "k", "text": "t", "data": {data}}}'
    answer = client.post("/v1/runs/run/events", content=body)
    assert answer.status_code == 422 and says in answer.json()["detail"]
    fine = f'{{"step": 0, "kind": "k", "text": "t", "data": {{"x": {2**63 - 1}, "y": NaN}}}}'
    assert client.post("/v1/runs/run/events", content=fine).status_code == 201
    assert client.get("/v1/runs/run/events").json()[0]["data"] == {"x": 2**63 - 1, "y": None}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            b'{"step": 0, ' + b", ".join(b'"k%d": 0' % i for i in range(200_000)) + b"}",
            "body: an object of 200001 keys",
        ),
        (
            b'{"step": 0, "trajectories": ['
            + b", ".join([b'{"actions": [' + b"1, " * 999 + b"1]}"] * 500)
            + b"]}",
            "trajectories.0",
        ),
        (
            b'{"step": 0, "metrics": {' + b", ".join(b'"k%d": "x"' % i for i in range(9000)) + b"}}",
            "metrics: 9000 given",
        ),
        (b"[" * 100_000, "body: not JSON (recursion limit exceeded"),
    ],
    ids=["keys", "actions", "metrics", "depth"],
)
def test_a_body_of_many_mistakes_costs_one(body, says):
    memory = psutil.Process().memory_info().rss
    with pytest.raises(UserError) as error:
        parsed(StepRecord, body)
    assert str(error.value).startswith(says)
    assert psutil.Process().memory_info().rss - memory < 30 * len(body)


def test_a_sparse_curve_costs_what_is_stored_of_it(client):
    metrics = {f"m{i}": float(i) for i in range(2000)}
    for step in (0, 1_000_000):
        assert client.post("/v1/runs/run/steps", json={"step": step, "metrics": metrics}).status_code == 200
    memory, began = psutil.Process().memory_info().rss, time.process_time()
    answer = client.get("/v1/runs/run/series").json()
    assert time.process_time() - began < 10 and psutil.Process().memory_info().rss - memory < 60 * MIB
    assert len(answer["series"]) == 2000 and answer["step"] == [0, 996216] and answer["stride"] == 4017
    assert answer["series"]["m7"] == {"mean": [7, 7], "min": [7, 7], "max": [7, 7]}
    exact = client.get("/v1/runs/run/series?names=m7&first=999990").json()
    assert (exact["step"], exact["stride"], exact["series"]) == ([1_000_000], 1, {"m7": {"mean": [7]}})


def test_the_names_of_a_run_and_the_trajectories_of_a_step_are_bounded(client, monkeypatch):
    for part in range(2):
        metrics = {f"m{part}.{i}": 1.0 for i in range(2000)}
        assert client.post("/v1/runs/run/steps", json={"step": part, "metrics": metrics}).status_code == 200
    answer = client.post(
        "/v1/runs/run/steps", json={"step": 2, "metrics": {f"n{i}": 1.0 for i in range(1500)}}
    )
    assert (
        answer.status_code == 422
        and "names of metrics; at most 5000 per run accepted" in answer.json()["detail"]
    )
    assert client.post("/v1/runs/run/steps", json={"step": 2, "metrics": {"m0.1": 2.0}}).status_code == 200
    monkeypatch.setattr("services.likelihood.store.base.MAX_STEP_TRAJECTORIES", 3)
    one = {"group": "g", "advantage": 0.0, "actions": []}
    for uid in "abc":
        body = {"step": 3, "trajectories": [{"uid": uid, **one}]}
        assert client.post("/v1/runs/run/steps", json=body).status_code == 200
    body = {"step": 3, "trajectories": [{"uid": "d", **one}]}
    answer = client.post("/v1/runs/run/steps", json=body)
    assert answer.status_code == 422 and "step 3 would hold 4 trajectories" in answer.json()["detail"]
    assert len(client.get("/v1/runs/run/steps/3/trajectories").json()) == 3


async def test_room_is_given_in_turn_and_one_request_alone_is_always_served():
    room = Room(100, wait_seconds=0.2)
    await room.take(500)  # alone
    with pytest.raises(EnvironmentLacks, match="100 bytes are held by other requests"):
        await room.take(1)
    room.give(500)
    await room.take(60)
    assert not room.try_take(60) and room.try_take(40) and room.held == 100
    room.give(100)
    assert room.held == 0 and Memory(100).bodies.limit == 25


def test_under_hostile_posts_the_service_stays_within_its_memory_and_answers(tmp_path):
    """Bodies of many sizes at once, whole, broken and cut off, for some seconds; then all is as before."""
    rng = random.Random(3)
    one = json.dumps(
        {"uid": "u", "group": "g", "advantage": 0, "actions": [{"tokens": 1, "logp_before": -1.0}] * 900}
    )
    large = '{"step": 1, "trajectories": [' + ", ".join([one] * 60) + "]}"
    bodies = [
        ("POST", "steps", large.encode()),
        ("POST", "steps", large.replace("-1.0", '"x"').encode()),
        ("POST", "steps", b'{"step": 1, "trajectories": [' + b"1, " * 700_000 + b"1]}"),
        (
            "POST",
            "steps",
            json.dumps({"step": 999_999, "metrics": {f"m{i}": 1 for i in range(2000)}}).encode(),
        ),
        ("PUT", "steps/1/tokens", npz(compressed=True, x=np.zeros(40 * MIB // 8))),
        ("PUT", "steps/1/tokens", npz()),
        ("GET", "series", b""),
        ("GET", "steps/1/trajectories", b""),
    ]
    slowest, done = [0.0], threading.Event()
    with serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0, memory_mib=128)) as server:

        def watch():
            with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
                while not done.is_set():
                    began = time.monotonic()
                    assert http.get("/v1/runs/none/stream").status_code == 404
                    slowest[0] = max(slowest[0], time.monotonic() - began)

        def attack(seed):
            seen, mine = set(), random.Random(seed)
            with httpx.Client(base_url=server.url, trust_env=False, timeout=120) as http:
                for _ in range(6):
                    method, path, body = mine.choice(bodies)
                    seen.add(
                        http.request(
                            method, f"/v1/runs/run{mine.randrange(3)}/{path}", content=body
                        ).status_code
                    )
            return seen

        before = psutil.Process().memory_info().rss
        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(4) as pool:
            answers = set().union(*pool.map(attack, [rng.random() for _ in range(4)]))
        done.set()
        watcher.join(60)
        grown = psutil.Process().memory_info().rss - before
        with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as http:
            assert http.post("/v1/runs/last/steps", json={"step": 0}).status_code == 200
    assert answers <= {200, 201, 404, 422, 503} and {200, 422} <= answers
    assert grown < 400 * MIB and slowest[0] < 20


class Poisoned(Quiet):
    """A service that breaks on step 1, whatever it is asked."""

    seen: ClassVar[list[int]] = []

    def do_POST(self):
        step = json.loads(self.rfile.read(int(self.headers["content-length"])))["step"]
        self.seen.append(step)
        broken = step == 1
        said = {"detail": "internal error: TypeError"} if broken else {"run": "run", "step": step}
        self.answer(500 if broken else 200, json.dumps(said).encode())

    def do_GET(self):
        self.answer(200, b"{}")


def three_steps_to(service, spool, caplog):
    """Post them; the one that breaks the service is refused in the end, and none waits."""
    with (
        serving(service) as url,
        caplog.at_level(logging.ERROR),
        LikelihoodClient(url, spool_dir=spool) as client,
    ):
        for step in range(3):
            client.post_step("run", StepRecord(step=step))
        assert client.flush(30) and client.refused == 1 and client.waiting == 0


def test_a_record_that_breaks_the_service_is_put_aside_and_those_behind_it_arrive(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(client_module, "RETRY_SECONDS", (0.01,))
    three_steps_to(Poisoned, tmp_path / "spool", caplog)
    assert Poisoned.seen == [0] + [1] * client_module.POISON_TRIES + [2]
    (bad,) = (tmp_path / "spool").glob("*.bad")
    assert b'"step":1' in bad.read_bytes()
    assert "step 1 failed 8 times (500 internal error: TypeError); put aside as" in caplog.text


def test_a_disk_that_takes_no_record_put_aside_does_not_stop_the_client(tmp_path, monkeypatch, caplog):
    class Broken(Poisoned):
        seen: ClassVar[list[int]] = []

    monkeypatch.setattr(client_module, "RETRY_SECONDS", (0.01,))
    save = Spool._save
    full = [EnvironmentLacks("spool: no space left")]

    def saved(spool, message, path):
        if full:
            raise full.pop()
        save(spool, message, path)

    monkeypatch.setattr(Spool, "_save", saved)
    three_steps_to(Broken, tmp_path / "spool", caplog)
    assert Broken.seen == [0] + [1] * 2 * client_module.POISON_TRIES + [2]
    assert len(list((tmp_path / "spool").glob("*.bad"))) == 1
    assert "step 1 cannot be put aside (spool: no space left): it is tried again" in caplog.text


def test_an_event_that_no_json_can_hold_does_not_stop_the_client(tmp_path, caplog):
    with serve_in_thread(ServeSettings(store=str(tmp_path / "l.db"), port=0)) as server:
        with LikelihoodClient(server.url, spool_dir=tmp_path / "spool") as client:
            client.post_event(
                "run", EventRecord.model_construct(step=0, kind="k", text="t", data={"x": 2**70})
            )
            client.post_step("run", StepRecord(step=0))
            assert client.flush(30) and client.refused == 1
        assert httpx.get(f"{server.url}/v1/runs/run/summary", trust_env=False).json()["steps"] == 1


def test_a_damaged_record_on_a_disk_that_takes_no_change_is_passed_over(tmp_path, monkeypatch, caplog):
    (tmp_path / "0000000000000000-step.msg").write_bytes(b"\xff" * 9)

    def read_only(source, target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("services.likelihood.spool.move", read_only)
    spool = Spool(tmp_path, 0, 8)
    assert len(spool) == 1 and spool.first() is None and len(spool) == 0
    assert "0000000000000000-step.msg cannot be read" in caplog.text
    spool.close()


def test_a_record_that_breaks_off_while_the_services_store_hangs_is_not_put_aside(
    tmp_path, monkeypatch, caplog
):
    """The process is up (/healthz), and takes no record: no message is to blame."""

    class Hanging(Poisoned):
        seen: ClassVar[list[int]] = []

        def do_POST(self):
            step = json.loads(self.rfile.read(int(self.headers["content-length"])))["step"]
            self.seen.append(step)
            hangs = len(self.seen) <= 2 * client_module.POISON_TRIES
            said = {"detail": "internal error"} if hangs else {"run": "run", "step": step}
            self.answer(500 if hangs else 200, json.dumps(said).encode())

        def do_GET(self):
            self.answer(200 if self.path == "/healthz" else 503, b"{}")

    monkeypatch.setattr(client_module, "RETRY_SECONDS", (0.01,))
    with (
        serving(Hanging) as url,
        caplog.at_level(logging.ERROR),
        LikelihoodClient(url, spool_dir=tmp_path / "spool") as client,
    ):
        for step in range(3):
            client.post_step("run", StepRecord(step=step))
        assert client.flush(30) and client.refused == 0 and client.waiting == 0
    assert Hanging.seen == [0] * 2 * client_module.POISON_TRIES + [0, 1, 2]
    assert not caplog.records and not list((tmp_path / "spool").glob("*.bad"))
