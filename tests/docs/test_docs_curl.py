"""Each `curl` of README and docs, read out of the pages and sent as it stands to the service that it asks.

An agent (port 8300) takes a trained model, which no test here has: those are counted, and not sent.
"""

import json
import re
import shlex
import shutil
import subprocess
import textwrap

import httpx
import pytest
from places import ROOT

from retriever_service.http.launch import serve_in_thread as serve_retriever
from retriever_service.indexing.build import build_index
from retriever_service.settings import ServerSettings
from services.likelihood.rest.launch import ServeSettings
from services.likelihood.rest.launch import serve_in_thread as serve_likelihood

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PORT = re.compile(r"(?:http://)?(?:127\.0\.0\.1|localhost):(\d+)")
# A page may change a run that the reader has: it is there.
NEEDS = "/v1/runs/mine/steps", {"step": 0, "metrics": {"reward/mean": 0.5}}
CORPUS = ("Hamlet: William Shakespeare wrote Hamlet.", "Assyria: Ashur was the capital of Assyria.")


def requests(text):
    """The `curl` commands of a page, with the lines that they go on in."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if not re.match(r" *curl ", line):
            continue
        end = at + 1
        while True:
            command = textwrap.dedent("\n".join(lines[at:end]))
            try:
                if not command.endswith("\\") and shlex.split(command):
                    break
            except ValueError:  # a quotation that goes on
                pass
            end += 1
        yield command


def test_a_request_over_several_lines_is_found_whole():
    text = "    curl a -d '{\n      1}'\n\n```sh\ncurl b \\\n  -H c\n```\n"
    assert list(requests(text)) == ["curl a -d '{\n  1}'", "curl b \\\n  -H c"]


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """{port of the pages: where the service is here}"""
    folder = tmp_path_factory.mktemp("services")
    rows = [json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(CORPUS)]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    build_index(folder / "corpus.jsonl", folder / "index")
    with (
        serve_retriever(ServerSettings(index=str(folder / "index"), port=0)) as retriever,
        serve_likelihood(ServeSettings(store=str(folder / "l.db"), port=0)) as likelihood,
    ):
        yield {"8000": retriever.url, "8100": likelihood.url}


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if list(requests(p.read_text(encoding="utf-8")))], ids=lambda p: p.name
)
def test_the_requests_of_a_page_are_answered(page, services):
    found = list(requests(page.read_text(encoding="utf-8")))
    ports = [PORT.search(command)[1] for command in found]
    assert set(ports) <= {*services, "8300"}
    path, body = NEEDS
    httpx.post(services["8100"] + path, json=body).raise_for_status()
    for command, port in zip(found, ports, strict=True):
        if port not in services:
            continue
        here = PORT.sub(services[port], command)
        done = subprocess.run(
            ["sh", "-ec", f"{here} -w '\\n%{{http_code}}'"], capture_output=True, text=True, timeout=60
        )
        answer, _, status = done.stdout.rpartition("\n")
        assert done.returncode == 0 and status[0] == "2", f"{command}\n{done.stdout}{done.stderr}"
        if port == "8000":
            assert json.loads(answer)["result"][0][0]["score"] > 0
