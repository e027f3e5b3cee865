"""An index of packed postings over millions of made passages, without their text.

    python -m benchmarks.made_corpus.postings SOURCE OUT PASSAGES [--seed N]

For sizes at which making, storing and reading the text would take hours: terms are drawn as
`benchmarks.made_corpus.passages` draws words (after stop words and stems; the same lengths, Good and Turing's
probabilities, names without an end, articles with words of their own), and go as sorted runs into the merge
of `index build`. Each document is its number alone, so the folder can be searched and served; documents and
the reading of a corpus are what it does not measure.
"""

from __future__ import annotations

import json
import time
from itertools import count as count_from
from pathlib import Path
from typing import BinaryIO

import numpy as np
import orjson
import psutil

from benchmarks.made_corpus.passages import OWN_SHARE, OWN_WORDS, Statistics, draw_names, name_of, parser
from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
from retriever_service.bm25.packed import build as runs
from retriever_service.index_folder.documents import OFFSETS_FILE, TEXT_FILE
from retriever_service.index_folder.rows import BLOCKS_FILE, PLACES_FILE
from retriever_service.indexing.workplace import seal_folder

CHUNK = 20_000
ARTICLE_PASSAGES = 6.5


class Terms:
    """Numbers of terms: those of the source, then names as they come."""

    def __init__(self, source: Path) -> None:
        analyzer = Analyzer(AnalyzerSettings())
        with source.open(encoding="utf-8") as file:
            self.own = [analyzer.terms(json.loads(line)["contents"]) for line in file]
        self.statistics = Statistics(self.own)
        self.names: dict[int, int] = {}
        self.text = [str(term) for term in self.statistics.words]
        self._known = {term: i for i, term in enumerate(self.text)}

    def of_source(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers of the terms, lengths) of passages of the source."""
        passages = self.own[first : first + count]
        flat = [self._known[term] for terms in passages for term in terms]
        return np.array(flat, np.int64), np.array([len(terms) for terms in passages], np.int64)

    def of_names(self, names: np.ndarray) -> np.ndarray:
        """Numbers of the terms of names, by the numbers of the names."""
        different, where = np.unique(names, return_inverse=True)
        numbers = []
        for name in different.tolist():
            number = self.names.get(name)
            if number is None:
                term = name_of(name).lower()
                number = self._known.get(term)
                if number is None:
                    number = len(self.text)
                    self.text.append(term)
                self.names[name] = number
            numbers.append(number)
        return np.array(numbers, np.int64)[where]


def draw_passages(terms: Terms, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of the terms, lengths) of made passages."""
    statistics = terms.statistics
    lengths = random.choice(statistics.lengths, count)
    total = int(lengths.sum())
    article = np.cumsum(random.random(count) < 1 / ARTICLE_PASSAGES)
    titles = terms.of_names(draw_names(random, 2 * (count + 1))).reshape(-1, 2)
    own = np.hstack([statistics.draw(random, OWN_WORDS * (count + 1)).reshape(-1, OWN_WORDS), titles])
    flat = statistics.draw(random, total)
    kind = random.random(total)
    row = np.repeat(np.arange(count, dtype=np.int64), lengths)
    new_at = np.flatnonzero(kind < statistics.new_share)
    flat[new_at] = terms.of_names(draw_names(random, len(new_at)))
    own_at = np.flatnonzero((kind >= statistics.new_share) & (kind < statistics.new_share + OWN_SHARE))
    flat[own_at] = own[article[row[own_at]], random.integers(0, OWN_WORDS + 2, len(own_at))]
    return flat, lengths


def write_run(flat: np.ndarray, lengths: np.ndarray, first: int, files: dict[str, BinaryIO]) -> None:
    """Append the postings of passages, of which `first` is the first row, as a sorted run."""
    count = len(lengths)
    keys = flat * count + np.repeat(np.arange(count, dtype=np.int64), lengths)
    keys.sort()
    at = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    tfs = np.diff(np.append(at, len(keys)))
    keys = keys[at]
    of = keys // count
    begins = np.flatnonzero(np.concatenate([[True], of[1:] != of[:-1]]))
    files[runs.RUN_TERMS].write(of[begins].astype(np.uint32).tobytes())
    files[runs.RUN_COUNTS].write(np.diff(np.append(begins, len(of))).astype(np.uint32).tobytes())
    files[runs.RUN_ROWS].write((first + keys % count).astype(np.uint32).tobytes())
    files[runs.RUN_TFS].write(tfs.astype(np.uint16).tobytes())
    files[runs.RUN_SIZES].write(np.array([len(begins), len(keys)], np.uint64).tobytes())
    files[runs.RUN_LENGTHS].write(lengths.astype(np.uint32).tobytes())


def make(source: Path, out: Path, passages: int, seed: int) -> dict:
    """Make the index, and say what its merge took."""
    out.mkdir(parents=True)
    terms = Terms(source)
    files = {name: (out / name).open("wb") for name in runs.RUN_FILES}
    with (out / TEXT_FILE).open("wb") as text:
        ends = [np.zeros(1, np.uint64)]
        first = 0
        for chunk in count_from(0):
            if first >= passages:
                break
            count = min(CHUNK, passages - first)
            if first < len(terms.own):
                count = min(count, len(terms.own) - first)
                flat, lengths = terms.of_source(first, count)
            else:
                flat, lengths = draw_passages(terms, np.random.default_rng([seed, chunk]), count)
            write_run(flat, lengths, first, files)
            lines = [
                b'{"id":"%d","contents":"\\"%d\\"\\nmade"}\n' % (i, i) for i in range(first, first + count)
            ]
            text.write(b"".join(lines))
            first += count
            ends.append(ends[-1][-1] + np.cumsum(list(map(len, lines)), dtype=np.uint64))
            if chunk % 25 == 24:
                print(f"{first:,} passages, {len(terms.text):,} terms", flush=True)
    (out / OFFSETS_FILE).write_bytes(np.concatenate(ends).tobytes())
    files[runs.RUN_VOCABULARY].write("".join(term + "\n" for term in terms.text).encode())
    for file in files.values():
        file.close()
    n_terms = len(terms.text)
    del terms
    process = psutil.Process()
    cpu = process.cpu_times().user
    started = time.perf_counter()
    runs.write_packed(
        out, k1=0.9, b=0.4, progress=lambda done, of: print(f"merged {done:,} of {of:,} postings", flush=True)
    )
    took = time.perf_counter() - started
    postings = (out / runs.RUN_TFS).stat().st_size // 2
    for name in (BLOCKS_FILE, PLACES_FILE):
        (out / name).touch()
    settings = {"analyzer": AnalyzerSettings().as_dict(), "k1": 0.9, "b": 0.4, "postings": "packed"}
    description = {
        "format": 3, "backend": "bm25", "corpus": "made", "corpus_sha256": "", "corpus_bytes": 0,
        "passages": passages, "skipped": 0, "skipped_reasons": [], "settings": settings,
    }  # fmt: skip
    seal_folder(out, description, runs.RUN_FILES)
    for name in (*runs.RUN_FILES, runs.MERGE_FILE):
        (out / name).unlink()
    return {
        "passages": passages,
        "terms": n_terms,
        "postings": postings,
        "merge_seconds": round(took, 1),
        "merge_cpu_seconds": round(process.cpu_times().user - cpu, 1),
        "bm25_bytes": sum(path.stat().st_size for path in (out / "bm25").iterdir()),
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    print(orjson.dumps(make(args.source, args.out, args.passages, args.seed)).decode())


if __name__ == "__main__":
    main()
