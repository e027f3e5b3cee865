"""Ports that are in use: of a run the doctor says what happens, and of a service alone what to give."""

import socket
from contextlib import closing

import pytest
from command_line import fresh_folder, run  # noqa: F401

from trainer.commands.checks import doctor
from trainer.commands.checks.findings import Finding


@pytest.fixture
def taken():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def test_a_run_takes_any_free_port_and_nothing_speaks_of_an_option(run, tmp_path, monkeypatch, taken):
    file = tmp_path / "c.yaml"
    file.write_text(
        "{model: {path: 'lab:0'}, data: {train: 'lab:train_questions:0'}, "
        f"retriever: {{corpus: 'lab:train_corpus:0'}}, control: {{port: {taken}}}}}"
    )
    monkeypatch.setattr(doctor, "PORTS", {taken: "`unspiral serve control` needs another: --port"})
    _, out, _ = run("doctor", "--config", str(file), "--all")
    said = f"{taken} is in use: the run takes any free port by itself, and `unspiral status` finds it"
    assert doctor.typed(said) in " ".join(out.split())
    assert "--port" not in out and f"port {taken}" not in out
    for change in ("control.port=0", "control.enabled=false"):
        _, out, _ = run("doctor", "--config", str(file), change)
        assert "control.port " not in out


def test_without_a_configuration_each_port_names_its_service_and_its_option(monkeypatch, taken):
    monkeypatch.setattr(doctor, "PORTS", {taken: "`unspiral serve control` needs another: --port"})
    assert list(doctor.check_ports()) == [
        Finding(
            f"port {taken}",
            "note",
            "in use",
            "`unspiral serve control` needs another: --port; a run takes any free port by itself",
        )
    ]
