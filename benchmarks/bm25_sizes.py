"""One BM25 engine over one corpus: what building takes, and what a question takes.

    python -m benchmarks.bm25_sizes ENGINE CORPUS QUESTIONS WORK

ENGINE is packed or bm25s-format (ours, by format of the postings), bm25s (the package, its numba backend),
tantivy, or lucene (the Java classes that pyserini wraps, out of its jar, called as it calls them; needs Java
and `pip install --no-deps pyserini==0.25.0 pyjnius`, nothing else of pyserini's). Prints a line of JSON. Run
the engines one after the other on an otherwise equal machine: seconds are of the clock, cpu_ms are processor
time per question, one question at a time, which other work on the machine changes less. QUESTIONS are JSON
Lines with `question`. The corpus is JSON Lines with `id` and `contents`. Engines that are not installed here
can be in an environment of their own: the two of ours alone need this project.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

TOPK = 3
WARMING = 3
"""Times that all questions are asked before they are measured: Java compiles what runs often."""


def contents(corpus: Path) -> Iterator[str]:
    """Texts of the passages."""
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["contents"]


def ours(postings: str) -> Callable[[Path, Path], Callable[[str], int]]:
    def make(corpus: Path, work: Path) -> Callable[[str], int]:
        from retriever_service.indexing.build import build_index
        from retriever_service.search.index import Index

        build_index(corpus, work, postings=postings)
        index = Index(work)
        return lambda question: len(index.search([question], TOPK)[0])

    return make


def bm25s_package(corpus: Path, work: Path) -> Callable[[str], int]:
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")
    texts = [*contents(corpus)]
    tokens = bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)
    engine = bm25s.BM25(k1=0.9, b=0.4, method="lucene", backend="numba")
    engine.index(tokens, show_progress=False)
    engine.save(work, corpus=[{"text": text} for text in texts])
    engine = bm25s.BM25.load(work, mmap=True, load_corpus=True)

    def search(question: str) -> int:
        asked = bm25s.tokenize(
            [question], stopwords="en", stemmer=stemmer, show_progress=False, return_ids=False
        )
        found, _ = engine.retrieve(asked, k=TOPK, show_progress=False, n_threads=1)
        return len(found[0])

    return search


def tantivy_package(corpus: Path, work: Path) -> Callable[[str], int]:
    import tantivy

    schema = tantivy.SchemaBuilder()
    schema.add_text_field("contents", stored=True, tokenizer_name="en_stem")
    work.mkdir()
    index = tantivy.Index(schema.build(), path=str(work))
    writer = index.writer(heap_size=1 << 28, num_threads=1)
    for text in contents(corpus):
        writer.add_document(tantivy.Document(contents=text))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    searcher = index.searcher()

    def search(question: str) -> int:
        asked = index.parse_query(" ".join(re.findall(r"\w+", question)).lower(), ["contents"])
        hits = searcher.search(asked, TOPK).hits
        return len([searcher.doc(address)["contents"][0] for _, address in hits])

    return search


def lucene_package(corpus: Path, work: Path) -> Callable[[str], int]:
    import jnius_config

    found = find_spec("pyserini")
    assert found is not None and found.submodule_search_locations
    (jar,) = Path(found.submodule_search_locations[0]).glob("resources/jars/anserini-*-fatjar.jar")
    jnius_config.set_classpath(str(jar))
    jnius_config.add_options("-Xmx2g", "--add-modules=jdk.incubator.vector")
    from jnius import autoclass

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "corpus.jsonl").symlink_to(corpus.resolve())
        autoclass("io.anserini.index.IndexCollection").main(
            [
                *("-collection", "JsonCollection", "-input", folder, "-index", str(work), "-threads", "1"),
                *("-generator", "DefaultLuceneDocumentGenerator", "-storeRaw", "-quiet"),
            ]
        )
    searcher = autoclass("io.anserini.search.SimpleSearcher")(str(work))
    searcher.set_bm25(0.9, 0.4)

    def search(question: str) -> int:
        return len([hit.lucene_document.get("raw") for hit in searcher.search(question, TOPK)])

    return search


ENGINES: dict[str, Callable[[Path, Path], Callable[[str], int]]] = {
    "packed": ours("packed"),
    "bm25s-format": ours("bm25s"),
    "bm25s": bm25s_package,
    "tantivy": tantivy_package,
    "lucene": lucene_package,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--limit", type=int, default=300)
    args = parser.parse_args()
    lines = args.questions.read_text("utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    questions = questions[:: max(1, len(questions) // args.limit)][: args.limit]
    shutil.rmtree(args.work, ignore_errors=True)
    started = time.perf_counter(), time.process_time()
    search = ENGINES[args.engine](args.corpus, args.work)
    built = time.perf_counter() - started[0], time.process_time() - started[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for question in questions * WARMING:
        search(question)
    wall = []
    cpu = []
    for question in questions:
        begun = time.perf_counter(), time.process_time()
        search(question)
        wall.append(1000 * (time.perf_counter() - begun[0]))
        cpu.append(1000 * (time.process_time() - begun[1]))
    wall.sort()
    cpu.sort()
    package = {"tantivy": "tantivy", "bm25s": "bm25s", "lucene": "pyserini"}.get(args.engine, "unspiral")
    print(
        json.dumps(
            {
                "engine": args.engine,
                "version": version(package),
                "python": platform.python_version(),
                "corpus": args.corpus.name,
                "questions": len(questions),
                "build_seconds": round(built[0], 1),
                "build_cpu_seconds": round(built[1], 1),
                "build_peak_mib": round(peak),
                "bytes": sum(path.stat().st_size for path in args.work.rglob("*") if path.is_file()),
                "p50_ms": round(wall[len(wall) // 2], 3),
                "p99_ms": round(wall[int(len(wall) * 0.99)], 3),
                "cpu_ms": round(sum(cpu) / len(cpu), 3),
                "cpu_p50_ms": round(cpu[len(cpu) // 2], 3),
                "cpu_p99_ms": round(cpu[int(len(cpu) * 0.99)], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
