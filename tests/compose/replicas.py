"""Two retrievers behind one name in real containers: a new index, and each replaced in turn, under load.

It is part `replicas` of check_stack.py. The load comes from a container of the same network, by the name
`retriever`: clients of this project, and plain ones that connect anew for each request.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from stack import ROOT, compose, containers, seen
from watching import say

PAIR = ("retriever", "retriever-second")
WORD = "lighthouse"
LOAD = """
import asyncio, json, sys, threading, urllib.request
from retriever_service.client import RetrieverClient
URL = "http://retriever:8000"

def tell(kind, text):  # in one piece: several threads write
    sys.stdout.write(f"{kind} {text}\\n")
    sys.stdout.flush()

def plain():
    body = json.dumps({"queries": ["WORD"], "topk": 1}).encode()
    asked = urllib.request.Request(URL + "/retrieve", body, {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                tell("plain", json.load(answer)["result"][0][0]["id"])
        except Exception as error:
            tell("plain-failed", repr(error))

async def ours(client):
    while True:
        try:
            tell("ours", (await client.retrieve(["WORD"], topk=1))[0][0].id)
        except Exception as error:
            tell("ours-failed", repr(error))
        await asyncio.sleep(0.02)

async def main():
    for _ in range(2):
        threading.Thread(target=plain, daemon=True).start()
    async with RetrieverClient(URL, timeout_seconds=30) as client:
        await asyncio.gather(*(ours(client) for _ in range(4)))

asyncio.run(main())
""".replace("WORD", WORD)


class Asked:
    """What the clients in the container have seen so far."""

    def __init__(self) -> None:
        words = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "python", "index", "-u", "-c", LOAD)
        self._process = subprocess.Popen(
            ["docker", "compose", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines += (line.split(maxsplit=1) for line in iter(self._process.stdout.readline, ""))

    def counted(self, since: int = 0) -> Counter[str]:
        return Counter(kind for kind, _ in self.lines[since:])

    def reaches(self, more: int) -> None:
        """Wait for so many answers more to each kind of client."""
        since = len(self.lines)

        def enough() -> bool:
            found = self.counted(since)
            return min(found["ours"], found["plain"]) >= more

        seen(f"{more} answers more", enough, 120)

    def answers(self, since: int) -> set[str]:
        return {text.strip() for kind, text in self.lines[since:] if "failed" not in kind}

    def failures(self, since: int, kind: str) -> list[str]:
        return [text for found, text in self.lines[since:] if found == f"{kind}-failed"]

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def index_of(data: Path, name: str) -> None:
    """Put the index of a corpus of one passage, whose id is `name`, where both retrievers look for theirs."""
    passage = {"id": name, "contents": f'"A {WORD}"\nThe {WORD} of {name}.'}
    (data / f"{name}.jsonl").write_text(json.dumps(passage) + "\n")
    os.environ["UNSPIRAL_CORPUS"] = f"/data/{name}.jsonl"
    compose("run", "--rm", "-T", "index")


def replicas(evidence: dict[str, Any]) -> None:
    data = Path(os.environ["UNSPIRAL_DATA"])
    compose("--profile", "*", "down", "--volumes", "--timeout", "2")
    index_of(data, "old")
    compose("--profile", "replicas", "up", "-d", "--wait", "--wait-timeout", "180", "--no-deps", *PAIR)
    asked = Asked()
    try:
        asked.reaches(50)
        assert asked.answers(0) == {"old"}, asked.answers(0)
        index_of(data, "new")
        # Both look every 5 s. The last 50 of each kind of client then come from the new index alone.
        seen("the new index", lambda: "new" in asked.answers(0), 60)

        def both() -> bool:
            before = len(asked.lines)
            asked.reaches(50)
            return asked.answers(before) == {"new"}

        seen("only the new index", both, 60)
        reload = asked.counted()
        assert not {"ours-failed", "plain-failed"} & reload.keys(), asked.lines
        say(f"a new index behind both retrievers under load, no request failed: {dict(reload)}")
        began = len(asked.lines)
        for service in PAIR:
            id = containers(service)[0]["Id"]
            compose("--profile", "replicas", "up", "-d", "--no-deps", "--force-recreate", "--wait", service)
            assert containers(service)[0]["Id"] != id
            asked.reaches(50)
        replaced = asked.counted(began)
        assert not asked.failures(began, "ours"), asked.failures(began, "ours")
        lost = dict(Counter(text.strip() for text in asked.failures(began, "plain")))
        say(
            f"both replaced in turn under load, no request of RetrieverClient failed: {dict(replaced)}"
            + (f"; of plain clients {lost}" if lost else "")
        )
        evidence |= {"reloaded": dict(reload), "replaced": dict(replaced), "lost by plain clients": lost}
    finally:
        asked.end()
        compose("--profile", "*", "down", "--volumes", "--timeout", "5")
