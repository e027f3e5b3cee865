"""How the cost of a BM25 search grows with the passages: the first ones of one large index, by size.

    python -m benchmarks.bm25_curve INDEX QUESTIONS WORK PASSAGES [PASSAGES ...] [--limit 200] [--same 50]

INDEX has packed postings and no additions. For each size the postings of its first passages are written to
WORK, without texts, as a build of those passages writes them; a size that the index does not exceed is the
index itself. Prints a line of JSON per size: processor time of a question, one at a time, top 3, and for how
many of `--same` questions the rows and scores are those of adding up all postings, to the bit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.bm25_serving import TOPK, added_up
from benchmarks.retriever import machine, read_questions, tell
from retriever_service.bm25.analysis import AnalyzerSettings
from retriever_service.bm25.packed import build as runs
from retriever_service.bm25.packed.files import open_packed
from retriever_service.bm25.packed.joined import JoinedPostings
from retriever_service.bm25.packed.search import PackedRanker
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import IndexInfo, read_info


def write_first(index: Path, info: IndexInfo, passages: int, work: Path) -> None:
    """Write `work/bm25/` of the first passages of an index."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    segment = open_packed(index)
    postings = JoinedPostings([segment], np.arange(len(segment.lengths)) < passages)
    (work / runs.RUN_LENGTHS).write_bytes(postings.lengths.tobytes())
    with (work / runs.RUN_VOCABULARY).open("wb") as file:
        file.writelines(postings.vocabulary())

    def note(done: int, of: int) -> None:
        print(f"{passages:,} passages: {done:,} of {of:,} postings", file=sys.stderr, flush=True)

    settings = info.settings
    runs.write_packed(work, k1=settings["k1"], b=settings["b"], progress=note, postings=postings)


def measured(index: Path, info: IndexInfo, questions: list[str], same: int) -> dict:
    """Cost and exactness of the postings in a folder."""
    settings = info.settings
    analyzer = AnalyzerSettings(**settings["analyzer"])
    ranker = PackedRanker([index], analyzer, k1=settings["k1"], b=settings["b"])
    equal = 0
    spent = []
    for question in questions:  # so that their pages are there
        ranker.rank([question], TOPK)
    for question in questions[:same]:
        equal += ranker.rank([question], TOPK)[0] == added_up(ranker, question, TOPK)
    for question in questions:
        begun = time.process_time()
        ranker.rank([question], TOPK)
        spent.append(1000 * (time.process_time() - begun))
    folder = index / "bm25"
    files = open_packed(index)
    return {
        "passages": len(files.lengths),
        "postings": int(files.frequencies.sum(dtype=np.int64)),
        "terms": len(files.frequencies),
        "questions": len(spent),
        "cpu_ms": round(float(np.mean(spent)), 3),
        "cpu_p50_ms": round(float(np.median(spent)), 3),
        "cpu_p99_ms": round(float(np.quantile(spent, 0.99)), 3),
        "bm25_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "same_as_adding_up": {"questions": min(same, len(questions)), "same": equal},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("passages", type=int, nargs="+")
    parser.add_argument("--limit", type=int, default=200, help="questions")
    parser.add_argument("--same", type=int, default=50)
    args = parser.parse_args()
    info = read_info(args.index)
    if info.segments or info.settings.get("postings") != "packed":
        raise IndexInvalid(f"index {args.index}: expected packed postings in one segment")
    asked = [row["question"] for row in read_questions(args.questions)]
    questions = asked[:: max(1, len(asked) // args.limit)][: args.limit]
    tell("machine", {"name": machine()})
    for passages in args.passages:
        if passages < info.passages:
            write_first(args.index, info, passages, args.work)
        place = args.work if passages < info.passages else args.index
        tell("size", measured(place, info, questions, args.same))


if __name__ == "__main__":
    main()
