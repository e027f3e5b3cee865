"""`unspiral doctor` inside a container: what its role needs, and nothing else."""

import io
import os

import pytest
from rich.console import Console

from services.control.launch import serve_in_thread
from services.control.records import RunStatus
from services.likelihood.rest.launch import without_password
from services.settings import ControlSettings
from trainer.commands.checks import doctor, doctor_roles
from trainer.commands.checks.doctor import checks_of, run_doctor, show, verdict
from trainer.commands.checks.doctor_addresses import check_address
from trainer.commands.checks.doctor_roles import (
    check_container,
    check_ray_package,
    check_run,
    check_serving,
    check_store,
    check_token,
    memory_limit,
)
from trainer.commands.checks.findings import Finding


def table(role, config=None):
    out = io.StringIO()
    code = run_doctor(config, Console(file=out, width=250), role)
    return code, out.getvalue()


def test_a_retriever_container_is_not_asked_for_torch_a_compiler_or_ray():
    _, text = table("retriever")
    assert "numba" in text and "serving" in text
    assert not any(word in text for word in ("torch", "compiler", "Ray", "vLLM", "port 8265"))
    assert {c.__name__ for c in checks_of("node") if hasattr(c, "__name__")} >= {
        "check_compiler",
        "check_ray",
        "check_gpus",
    }


def test_the_likelihood_container_without_token_or_with_a_dead_redis_is_told_what_to_do(monkeypatch):
    monkeypatch.delenv("UNSPIRAL_API_TOKEN", raising=False)
    monkeypatch.setenv("UNSPIRAL_STORE", "redis://:very-secret@127.0.0.1:9/0")
    code, text = table("likelihood")
    assert code == 3
    assert "UNSPIRAL_API_TOKEN" in text and "deploy/new_env.sh" in text
    assert "redis://127.0.0.1:9/0" in text and "very-secret" not in text


def test_a_store_that_answers_is_good(monkeypatch, tmp_path):
    monkeypatch.setenv("UNSPIRAL_API_TOKEN", "t" * 40)
    monkeypatch.setenv("UNSPIRAL_STORE", str(tmp_path / "likelihood.db"))
    assert [f.level for f in (*check_token(), *check_store())] == ["good", "good"]
    assert "t" * 40 not in str([f.seen for f in check_token()])


def test_the_control_container_says_which_run_it_found_and_that_strangers_are_refused(monkeypatch):
    class Here:
        async def status(self):
            return RunStatus(state="running", run="mine", step=7, steps=9)

    monkeypatch.setenv("UNSPIRAL_API_TOKEN", "t" * 40)
    server = serve_in_thread(Here(), ControlSettings(port=0), print)
    try:
        monkeypatch.setitem(doctor_roles.READY, "control", f"{server.url}/readyz")
        found = {f.what: f for f in (*check_ray_package(), *check_run())}
        assert {f.level for f in found.values()} == {"good"} and found["run"].seen == "mine: running, step 7"
        monkeypatch.setenv("UNSPIRAL_API_TOKEN", "another")
        (refused,) = check_run()
        assert refused.level == "bad" and "401" in refused.seen
    finally:
        server.stop()
    assert [f.level for f in (*check_ray_package(), *check_run())] == ["good", "note"], (
        "nothing there is no fault of the container's"
    )
    code, text = table("control")
    assert code == 0 and not any(word in text for word in ("torch", "compiler", "/runs", "UNSPIRAL_STORE"))


@pytest.mark.parametrize(
    ("text", "limit"),
    [("2147483648\n", 2 << 30), ("max\n", None), (str(1 << 63), None)],
    ids=["limited", "v2 unlimited", "v1 unlimited"],
)
def test_the_memory_limit_is_the_containers_own(tmp_path, text, limit):
    file = tmp_path / "memory.max"
    file.write_text(text)
    assert memory_limit((tmp_path / "absent", file)) == limit


def test_a_limit_that_is_too_small_and_missing_shared_folders_are_bad(monkeypatch, tmp_path):
    file = tmp_path / "memory.max"
    file.write_text(str(1 << 30))
    monkeypatch.setattr(doctor_roles, "memory_limit", lambda: 1 << 30)
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    found = {f.what: f for f in check_container("node")}
    assert found["memory limit"].level == "bad" and "3 GiB" in found["memory limit"].advice
    assert found[str(tmp_path)].level == "good"
    assert found["/runs"].level == ("good" if os.access("/runs", os.W_OK) else "bad")


def test_serving_tells_a_server_that_is_up_from_one_that_is_not(monkeypatch, tmp_path):
    from services.likelihood.rest.launch import ServeSettings, serve_in_thread

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the services' clients go by none
    server = serve_in_thread(ServeSettings(store=str(tmp_path / "s.db"), port=0))
    try:
        monkeypatch.setitem(doctor_roles.READY, "likelihood", f"{server.url}/readyz")
        assert [f.level for f in (*check_serving("likelihood"), check_address("store.url", server.url))] == [
            "good",
            "good",
        ]
    finally:
        server.stop()
    monkeypatch.setitem(doctor_roles.READY, "likelihood", "http://127.0.0.1:9/readyz")
    assert [f.level for f in check_serving("likelihood")] == ["note"]


def test_a_configuration_whose_services_do_not_answer_is_bad(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(
        "{model: {path: 'lab:0'}, data: {train: 'lab:train_questions:0'}, retriever: {url: "
        "'http://127.0.0.1:9'}, "
        "store: {url: 'http://127.0.0.1:9'}}"
    )
    code, text = table("retriever", config)
    assert code == 3
    assert text.count("does not answer from here") == 2


def test_extras_are_named_in_full(monkeypatch):
    monkeypatch.setattr("trainer.commands.checks.doctor.version", lambda package: None)
    _, text = table("workstation")
    assert "pip install '.[cpu]'" in text


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("redis://:p%40ss@redis:6379/0", "redis://redis:6379/0"),
        ("rediss://u:p@h/1", "rediss://h/1"),
        ("redis://h/0", "redis://h/0"),
        ("redis://h/0?password=p", "redis://h/0?password=***"),
        ("sqlite:a@b.db", "sqlite:a@b.db"),
        ("likelihood.db", "likelihood.db"),
    ],
)
def test_the_stores_password_is_never_shown(store, shown):
    assert without_password(store) == shown


def test_advice_stands_on_lines_of_its_own_and_breaks_no_word():
    out = io.StringIO()
    advice = "set RAY_raylet_start_wait_time_s=180 where other programs take the cores of this machine"
    findings = [
        Finding("load", "note", "9.6 in the last minute, 9.2 in the last 15 minutes, on 2 cores", advice),
        Finding("a name of many letters, port 8100", "good", "reached from this machine"),
    ]
    show(findings, Console(file=out, width=60))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("note  load  ") and lines[1].startswith(" " * 20)
    assert any("RAY_raylet_start_wait_time_s=180" in line for line in lines)
    assert [line for line in lines if line.startswith("      -> ")]
    assert [line for line in lines if line.startswith("ok    a name of many letters, port 8100  reached")]


def test_the_last_line_is_the_verdict():
    good = [Finding("training", "good", "torch"), Finding("GPU", "note", "none")]
    assert verdict(good) == "ready for `unspiral demo` and for small models on this CPU"
    gpu = [good[0], Finding("GPU", "good", "2 x H200")]
    assert verdict(gpu).startswith("ready to train on 2 x H200;")
    assert verdict([Finding("training", "note", "")]).startswith("ready for the services and for data; not")
    assert verdict([*good, Finding("memory", "bad", "1 GiB")]) == "not ready: see memory above"


def test_the_questions_and_the_gpus_of_a_configuration_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor, "gpus_here", lambda: 0)
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "who?", "answer": "Homer"}\n')
    config = tmp_path / "c.yaml"
    config.write_text(
        f"{{model: {{path: 'lab:0'}}, data: {{train: '{questions}'}}, "
        "retriever: {corpus: 'lab:corpus:0'}, rollout: {share_gpus: true}}"
    )
    code, text = table("retriever", config)
    assert "q.jsonl: 1 question in 1 row" in text
    assert code == 3 and "BAD   GPUs" in text
    assert "rollout.share_gpus=true: needs 1 GPU, and this machine has none" in " ".join(text.split())
    monkeypatch.setattr(doctor, "gpus_here", lambda: 1)
    assert "BAD   GPUs" not in table("retriever", config)[1]
    with questions.open("a") as more:
        more.write('{"title": "a"}\n')
    code, text = table("retriever", config)
    assert code == 3 and "q.jsonl: 1 question in 2 rows" in text and "q.jsonl, line 2: expected" in text
    questions.write_bytes(b"\x00\x01\x02\xff" * 50)
    code, text = table("retriever", config)
    assert code == 3 and "binary" in text and "configuration" in text, "the other findings stand too"
