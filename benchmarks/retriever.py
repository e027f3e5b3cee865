"""Measurements of the retrieval service. Every number that is claimed is a ratio of two things measured in
turns in one run.

    python -m benchmarks.retriever WHAT --index DIR --questions F

    web        requests/s against an empty route of the same server
    batching   with and without micro-batching, and a naive server
    encoder    queries/s of a dense index's encoder alone, by batch and threads
    soak       5,000 requests: memory, file descriptors, p99
    start      cold and warm start, memory
    quality    answers in the top 3, by source and by backend
    ranks      ranks against a slow BM25 in double precision

Corpora of any size: `benchmarks/retriever_load/corpora.py`. The load comes from another process on the same
machine (`benchmarks/retriever_load/http_load.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from benchmarks.retriever_load.http_load import get, load, post

ROOT = Path(__file__).parents[1]


def machine() -> str:
    name = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores, {name}, load {os.getloadavg()[0]:.1f} before the run"


def tell(what: str, found: dict) -> None:
    """Print one measurement as a line of JSON, with the machine's load at that moment."""
    load_average = round(os.getloadavg()[0], 1)
    print(json.dumps({"what": what, **found, "load_average": load_average}), flush=True)


def read_questions(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@contextlib.contextmanager
def server(*words: object) -> Iterator[tuple[str, psutil.Process]]:
    """Our server in a process of its own: its address, once it is ready, and the process."""
    command = [sys.executable, "-m", "retriever_service", "serve", "--port", "0", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            url = re.search(r"http://\S+:\d+", process.stdout.readline()).group()
            wait_ready(url)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


@contextlib.contextmanager
def naive_server(index: Path, encoder_dtype: str) -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "benchmarks.retriever_load.naive_retriever",
        str(index),
        str(port),
        encoder_dtype,
    ]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_ready(url: str, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", trust_env=False, timeout=10).status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(url)


def posts(questions: list[dict]) -> list[bytes]:
    return [
        post("/retrieve", {"queries": [q["question"]], "topk": 3, "return_scores": True}) for q in questions
    ]


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def all_cpu_seconds(process: psutil.Process) -> float:
    """Processor time of a server's processes so far."""
    return sum(cpu_seconds(one) for one in (process, *process.children(recursive=True)))


def web(args: argparse.Namespace) -> None:
    """The share of an empty route's rate that searches reach, the cache off, and the processor time that each
    takes."""
    requests, empty = posts(read_questions(args.questions)), [get("/healthz")]
    with server("--index", args.index, "--cache-size", 0) as (url, process):
        for clients in args.clients:
            best: dict[str, float] = defaultdict(float)
            cpu: dict[str, float] = defaultdict(lambda: float("inf"))
            ratios = []
            for _ in range(args.rounds):
                rates = {}
                for name, what in (("empty", empty), ("retrieve", requests)):
                    before = cpu_seconds(process)
                    done = load(url, what, clients, args.seconds, warm_up=0)
                    assert not done["failures"]
                    rates[name] = done["rate"]
                    best[name] = max(best[name], done["rate"])
                    cpu[name] = min(cpu[name], (cpu_seconds(process) - before) / (done["n"] + clients) * 1e6)
                ratios.append(rates["retrieve"] / rates["empty"])
            middle = sorted(ratios)[len(ratios) // 2]
            print(
                f"{clients:4} clients: retrieve / empty = {best['retrieve'] / best['empty']:.2f} of the best "
                f"rates, {middle:.2f} in the median"
                f" round ({best['retrieve']:.0f} and {best['empty']:.0f} requests/s); server's CPU a request"
                f" {cpu['retrieve']:.0f} and {cpu['empty']:.0f} us",
                flush=True,
            )


def batching(args: argparse.Namespace) -> None:
    """Queries/s and p99 of single-query clients: micro-batching, batches of one, and the naive server."""
    requests = posts(read_questions(args.questions))
    ours = ("--index", args.index, "--cache-size", 0, "--encoder-dtype", args.encoder_dtype)
    with (
        server(*ours) as (batched, _),
        server(*ours, "--batch-size", 1) as (single, _),
        naive_server(args.index, args.encoder_dtype) as naive,
    ):
        for clients in args.clients:
            results: dict[str, list[dict]] = defaultdict(list)
            for _ in range(args.rounds):
                for name, url in (("batched", batched), ("one at a time", single), ("naive", naive)):
                    results[name].append(load(url, requests, clients, args.seconds))
            rate = {name: max(r["rate"] for r in rs) for name, rs in results.items()}
            p99 = {name: min(r["p99_ms"] for r in rs) for name, rs in results.items()}
            print(
                f"{clients:4} clients: batched / one at a time = "
                f"{rate['batched'] / rate['one at a time']:.2f}, batched / naive ="
                f" {rate['batched'] / rate['naive']:.1f} "
                f"({', '.join(f'{n} {r:.0f}/s, p99 {p99[n]:.0f} ms' for n, r in rate.items())})",
                flush=True,
            )


def encoder(args: argparse.Namespace) -> None:
    """Queries/s of the encoder alone: what batches can gain on this machine, whatever the server does."""
    import torch

    from retriever_service.dense.encoder import Encoder, EncoderSettings
    from retriever_service.index_folder.description import read_info

    texts = [q["question"] for q in read_questions(args.questions)][:512]
    settings = EncoderSettings(**read_info(args.index).settings["encoder"])
    cores = torch.get_num_threads()
    for dtype in ("float32", "bfloat16"):
        for threads in sorted({1, cores}):
            torch.set_num_threads(threads)
            model = Encoder(settings, dtype=dtype)  # as many batches side by side
            model.queries(texts[:64])
            rates = {}
            for batch in (1, 8, 32, 64):
                started = time.perf_counter()
                for begin in range(0, len(texts), batch):
                    model.queries(texts[begin : begin + batch])
                rates[batch] = len(texts) / (time.perf_counter() - started)
            print(
                f"{dtype}, {threads} threads: " + ", ".join(f"{r:.0f}/s at {b}" for b, r in rates.items()),
                flush=True,
            )


def soak(args: argparse.Namespace) -> None:
    """Requests in slices of a second, ten at least, from 16 clients: what grows would show."""
    requests = posts(read_questions(args.questions))
    with server("--index", args.index, "--cache-size", 1000) as (url, process):
        slices, done = [], 0
        load(url, requests, 16, 1.0)
        while done < args.requests or len(slices) < 10:
            result = load(url, requests, 16, 1.0, warm_up=0)
            done += result["n"]
            slices.append(
                (result["n"], result["p99_ms"], process.memory_info().rss / 2**20, process.num_fds())
            )
            assert not result["failures"]
        for n, p99, rss, fds in slices:
            print(f"{n:6} requests, p99 {p99:6.1f} ms, {rss:7.1f} MiB, {fds} file descriptors")
        first, last = slices[0], slices[-1]
        print(
            f"last / first: memory {last[2] / first[2]:.3f}, p99 {last[1] / first[1]:.2f}; "
            f"file descriptors {last[3] - first[3]:+d}"
        )


def start(args: argparse.Namespace) -> None:
    """Time to the first answer with the index out of the page cache (where that can be asked for) and in it;
    memory after."""
    for name in ("cold", "warm"):
        if name == "cold":
            for path in args.index.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with server("--index", args.index) as (url, process):
            ready = time.perf_counter() - started
            httpx.post(
                f"{url}/retrieve",
                json={"queries": [read_questions(args.questions)[0]["question"]]},
                trust_env=False,
                timeout=60,
            )
            first = time.perf_counter() - started
            memory = process.memory_full_info()
            print(
                f"{name}: ready after {ready:.2f} s, first answer after {first:.2f} s, "
                f"{memory.uss / 2**20:.0f} MiB of its own, {memory.rss / 2**20:.0f} MiB with mapped pages"
            )


def quality(args: argparse.Namespace) -> None:
    """The share of questions one of whose answers stands in the text of the top 3."""
    from retriever_service.search.index import Index

    questions = read_questions(args.questions)
    index = Index(args.index)
    parts = getattr(index.ranker, "_rankers", [index.ranker])
    rankers = {type(r).__name__.removesuffix("Ranker").lower(): r for r in (*parts, index.ranker)}
    texts = [q["question"] for q in questions]
    table: dict[str, dict[str, list[bool]]] = {}
    for name, ranker in rankers.items():
        hits = table[name] = defaultdict(list)
        for begin in range(0, len(texts), 64):
            for question, ranked in zip(
                questions[begin:], ranker.rank(texts[begin : begin + 64], 3), strict=False
            ):
                found = " ".join(index.documents.get(row)[1] for row, _ in ranked).lower()
                hits[question["data_source"]].append(
                    any(answer.lower() in found for answer in question["golden_answers"])
                )
                hits["all"].append(hits[question["data_source"]][-1])
    sources = [*sorted({q["data_source"] for q in questions}), "all"]
    print("| source | n | " + " | ".join(table) + " |\n| --- |" + " --- |" * (len(table) + 1))
    for source in sources:
        cells = [f"{sum(hits[source]) / len(hits[source]):.3f}" for hits in table.values()]
        print(f"| {source} | {len(next(iter(table.values()))[source])} | " + " | ".join(cells) + " |")


def ranks(args: argparse.Namespace) -> None:
    """Top 10 of 200 questions against BM25 as its formula is written, in double precision."""
    import math
    from collections import Counter

    from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
    from retriever_service.search.index import Index

    index, analyzer = Index(args.index), Analyzer(AnalyzerSettings())
    documents = [Counter(analyzer.terms(index.documents.get(row)[1])) for row in range(index.info.passages)]
    lengths = [sum(d.values()) for d in documents]
    mean, n = sum(lengths) / len(lengths), len(documents)
    postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row, document in enumerate(documents):
        for term, tf in document.items():
            postings[term].append((row, tf))
    questions = read_questions(args.questions)
    questions = questions[:: max(1, len(questions) // 200)][:200]
    same = close = 0
    for question in questions:
        scores: dict[int, float] = defaultdict(float)
        for term in analyzer.terms(question["question"]):
            idf = math.log(1 + (n - len(postings[term]) + 0.5) / (len(postings[term]) + 0.5))
            for row, tf in postings[term]:
                scores[row] += idf * tf / (tf + 0.9 * (0.6 + 0.4 * lengths[row] / mean))
        expected = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:10]
        got = index.ranker.rank([question["question"]], 10)[0]
        same += [row for row, _ in got] == [row for row, _ in expected]
        close += all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(got, expected, strict=True))
    print(
        f"{same} of {len(questions)} top tens are the same rows in the same order, "
        f"{close} have the same scores to 1e-4"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["web", "batching", "encoder", "soak", "start", "quality", "ranks"])
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument(
        "--encoder-dtype", default="auto", help="numbers of a dense index's encoder, for all servers alike"
    )
    args = parser.parse_args()
    print(f"{args.what}: {args.index.name}, {machine()}", flush=True)
    globals()[args.what](args)


if __name__ == "__main__":
    main()
