"""A packed BM25 index as it is served: exactness, start, latency and throughput, memory.

    python -m benchmarks.bm25_serving INDEX QUESTIONS [--clients 1 16 64] [--rates 100 200] [--workers 2]
        [--seconds 20]

Prints a line of JSON per measurement. `exact` compares the rows and scores of 200 questions, to the bit, with
adding up all postings of their terms, and gives the processor time that each takes. `start` is the time to
the first answer with the index out of the page cache and in it. `load` asks different questions over HTTP,
the result cache off, from another process of this machine, whose work is taken from the server's where there
are no cores to spare: from clients that never pause, and then from the last number of `--clients`, which ask
at random times, `--rates` questions per second together. Memory is that of all processes of the server: their
own, and with mapped pages, each counted once. Measure on an idle machine: `load_average` says whether it was
one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks.retriever import all_cpu_seconds, machine, posts, read_questions, server, tell
from benchmarks.retriever_load.http_load import load
from retriever_service.bm25.packed.blocks import unpack_list
from retriever_service.bm25.packed.search import PackedRanker
from retriever_service.search.index import Index

TOPK = 3


def added_up(ranker: PackedRanker, question: str, topk: int) -> list[tuple[int, float]]:
    """(row, score) of the best rows of an index of one segment by all scores of all rows."""
    (segment,) = ranker._segments
    files = segment.files
    counts = Counter(ranker._terms(question))
    scores = np.zeros(segment.rows, np.float32)
    for term in sorted(counts, key=lambda term: -counts[term] * ranker._idfs[term]):
        (number,) = ranker._numbers[term]
        frequency = int(files.frequencies[number])
        rows = np.empty(frequency, np.int32)
        tfs = np.empty(frequency, np.int32)
        block = np.int64(files.first_block[number])
        unpack_list(files.words, files.firsts, files.places, files.widths, block, frequency, rows, tfs)
        own = ranker._idfs[term] * tfs / (tfs + segment.norm[files.lengths[rows]])
        scores[rows] += np.float32(counts[term]) * own.astype(np.float32)
    most = min(topk, int(np.count_nonzero(scores)))
    if not most:
        return []
    least = np.partition(scores, len(scores) - most)[len(scores) - most]
    matches = np.flatnonzero(scores >= least)
    best = matches[np.lexsort((matches, -scores[matches]))][:most]
    return list(zip(best.tolist(), scores[best].tolist(), strict=True))


def exact(index: Path, questions: list[str]) -> dict:
    """How many questions get the rows and scores of adding everything up, and the processor time of each:
    with the impacts of frequent terms and, in turns, without them, as earlier versions searched."""
    opened = Index(index)
    ranker = opened.ranker
    assert isinstance(ranker, PackedRanker), "not an index of packed postings"
    (segment,) = ranker._segments
    forms = {"impacts": segment.files, "blocks": replace(segment.files, impacts=None)}
    cpu: dict[str, list[float]] = {form: [] for form in forms}
    same = dict.fromkeys(forms, 0)
    for measured in (False, True):
        for question in questions:
            expected = [] if measured else [added_up(ranker, question, TOPK)]
            for form, files in forms.items():
                segment.files = files
                begun = time.process_time()
                found = ranker.rank([question], TOPK)
                if measured:
                    cpu[form].append(1000 * (time.process_time() - begun))
                else:
                    same[form] += found == expected
    opened.close()
    told = {"passages": opened.info.passages, "questions": len(questions), "same": same}
    for form, milliseconds in cpu.items():
        told[f"{form}_cpu_ms"] = round(float(np.mean(milliseconds)), 3)
        told[f"{form}_cpu_p50_ms"] = round(float(np.median(milliseconds)), 3)
        told[f"{form}_cpu_p99_ms"] = round(float(np.quantile(milliseconds, 0.99)), 3)
    return told


def memory(process: psutil.Process) -> dict:
    """MiB of a server's processes."""
    found = [one.memory_full_info() for one in (process, *process.children(recursive=True))]
    return {
        "processes": len(found),
        "own_mib": round(sum(one.uss for one in found) / 2**20),
        "with_mapped_mib": round(sum(one.pss for one in found) / 2**20),
    }


def start(index: Path, question: str, cold: bool) -> dict:
    """Seconds until one worker is ready, and until it has answered."""
    for path in index.rglob("*"):
        if cold and path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    with server("--index", index) as (url, process):
        ready = time.perf_counter() - begun
        body = {"queries": [question], "topk": TOPK}
        httpx.post(f"{url}/retrieve", json=body, trust_env=False, timeout=60).raise_for_status()
        first = time.perf_counter() - begun
        return {
            "cold": cold,
            "ready_seconds": round(ready, 2),
            "first_answer_seconds": round(first, 2),
            **memory(process),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rates", type=float, nargs="*", default=[100, 200])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--exact", type=int, default=200)
    args = parser.parse_args()
    asked = read_questions(args.questions)
    some = [question["question"] for question in asked[:: max(1, len(asked) // args.exact)]][: args.exact]

    tell("machine", {"name": machine(), "index": str(args.index)})
    # The first start compiles what the cache does not have.
    start(args.index, some[0], cold=False)
    for cold in (True, False):
        tell("start", start(args.index, some[0], cold))
    tell("exact", exact(args.index, some))
    requests = posts(asked)
    words = ("--index", args.index, "--cache-size", 0, "--workers", args.workers)
    with server(*words) as (url, process):
        load(url, requests, 2 * args.workers, 3)  # so that every worker has the pages of the questions
        loads = [(clients, 0.0) for clients in args.clients]
        for clients, rate in [*loads, *((args.clients[-1], rate) for rate in args.rates)]:
            before = all_cpu_seconds(process)
            done = load(url, requests, clients, args.seconds, warm_up=0, rate=rate)
            spent = all_cpu_seconds(process) - before
            cpu = {"cpu_ms_per_question": round(1000 * spent / (done["n"] + clients), 3)}
            rounded = {name: round(value, 2) for name, value in done.items()}
            offered = {"offered": rate} if rate else {}
            tell("load", {"workers": args.workers, "clients": clients, **offered, **rounded, **cpu})
        tell("memory", memory(process))


if __name__ == "__main__":
    main()
