"""What answers in the likelihood service's place: no record is lost to it, none is taken for stored, and no
probe ends the run."""

from __future__ import annotations

import pytest
from test_likelihood_client import record, tokens
from test_retriever_client import scripted_server

from services.likelihood import client as clients
from services.likelihood.client import LikelihoodClient

STORED = (200, {"run": "run", "step": 0, "attempt": 0, "stored": 3}, {})


@pytest.fixture
def answering():
    with scripted_server() as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(clients, "RETRY_SECONDS", (0.01,))


@pytest.mark.parametrize(
    "odd",
    [
        (200, b"<html>Sign in</html>", {"content-type": "text/html"}),
        (200, b"", {}),
        (200, {"run": "another"}, {}),
        (200, b"[" * 100_000, {}),
        (302, b"", {"location": "/login"}),
        (404, b"default backend - 404", {}),
        (405, b"<html>", {}),
        (408, b"", {}),
        (400, b"\xff\xfe", {}),
    ],
    ids=["page", "nothing", "another run", "brackets", "redirect", "404", "405", "408", "bytes"],
)
def test_a_record_is_stored_only_where_the_service_says_so(answering, tmp_path, odd):
    url, answers, seen = answering
    answers += [odd, odd, STORED]
    with LikelihoodClient(url, spool_dir=tmp_path / "spool") as client:
        client.post_step("run", record(0))
        assert client.flush(60) and client.refused == 0
    assert len(seen) == 3


@pytest.mark.parametrize(
    "refusal", [(422, {"detail": "step: below 0"}, {}), (404, {"detail": "no"}, {}), (413, b"too large", {})]
)
def test_a_record_that_is_refused_for_good_is_not_repeated(answering, tmp_path, refusal):
    url, answers, seen = answering
    answers += [refusal, STORED]
    with LikelihoodClient(url, spool_dir=tmp_path / "spool") as client:
        for step in range(2):
            client.post_step("run", record(step))
        assert client.flush(60) and client.refused == 1
    assert len(seen) == 2


@pytest.mark.parametrize(
    "odd",
    [(200, b"<html>", {}), (200, b"PK\x03\x04 torn", {}), (302, b"", {}), (500, b"[" * 100_000, {})],
    ids=["page", "torn", "redirect", "brackets"],
)
def test_token_arrays_that_cannot_be_read_are_no_error_of_the_run(answering, tmp_path, caplog, odd):
    url, answers, _ = answering
    answers.append(odd)
    with LikelihoodClient(url, spool_dir=tmp_path / "spool") as client:
        assert client.get_tokens("run", 3) is None
    assert "token arrays of step 3 not read (" in caplog.text


def test_nor_are_those_that_wait_in_a_damaged_file(tmp_path, answering, caplog):
    url, answers, _ = answering
    answers.append((503, {"detail": "away"}, {}))
    client = LikelihoodClient(url, spool_dir=tmp_path / "spool", memory_bytes=10)
    client.put_tokens("run", 3, tokens())
    (file,) = (tmp_path / "spool").glob("*-tokens.msg")
    file.write_bytes(file.read_bytes()[:-40])
    assert client.get_tokens("run", 3) is None and "token arrays of step 3 not read (" in caplog.text
    client.close(timeout=0.1)
