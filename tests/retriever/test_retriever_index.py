"""Ranks, corpora, builds that are killed, indexes that are damaged."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from itertools import chain
from pathlib import Path

import bm25s
import numpy as np
import pytest
import Stemmer
from places import ROOT

from retriever_service.bm25 import analysis
from retriever_service.bm25 import build as bm25_build
from retriever_service.bm25.analysis import Analyzer, AnalyzerSettings
from retriever_service.bm25.stop_words import ENGLISH, OTHERS, stop_words
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.corpus import read_corpus
from retriever_service.index_folder.description import read_info, verify
from retriever_service.indexing.build import build_index
from retriever_service.indexing.sinks import PostingsSink
from retriever_service.search.index import Index
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401

ROWS = [json.loads(line) for line in CORPUS.read_text("utf-8").splitlines()]
QUERIES = [
    "Which river flows past Morwen?",
    "the weaver born in Aldersea",
    "mayor chosen by the Blue Lantern",
    "Mina Frost",
    "largest house of Fennick houses houses",
    "Übersee café Århus",
    "founded in 1204",
    "Владивосток",
    "town",
]


def slow_bm25(texts: list[str], query: str, k1: float = 0.9, b: float = 0.4) -> list[tuple[int, float]]:
    """BM25 as the formula is written, one document at a time, in double precision."""
    stem, stop = Stemmer.Stemmer("english").stemWord, set(bm25s.stopwords.STOPWORDS_EN)

    def terms(text):
        return [stem(w) for w in re.findall(r"\w+", text.lower()) if w not in stop]

    documents = [Counter(terms(t)) for t in texts]
    mean = sum(sum(d.values()) for d in documents) / len(documents)
    scores = []
    for row, document in enumerate(documents):
        score = 0.0
        for term in terms(query):
            df, tf = sum(term in d for d in documents), document[term]
            if tf:
                norm = k1 * (1 - b + b * sum(document.values()) / mean)
                score += math.log(1 + (len(documents) - df + 0.5) / (df + 0.5)) * tf / (tf + norm)
        if score > 0:
            scores.append((row, score))
    return sorted(scores, key=lambda s: (-round(s[1], 5), s[0]))


@pytest.mark.parametrize("query", QUERIES)
def test_ranks_and_scores_equal_an_independent_slow_bm25(small_index, query):
    expected = slow_bm25([row["contents"] for row in ROWS], query)
    (got,) = Index(small_index).ranker.rank([query], 20)
    got = sorted(((row, score) for row, score in got), key=lambda s: (-round(s[1], 5), s[0]))
    assert [row for row, _ in got] == [row for row, _ in expected[:20]]
    assert [s for _, s in got] == pytest.approx([s for _, s in expected[:20]], rel=1e-5)


def test_the_index_is_one_that_bm25s_itself_reads_and_scores_alike(small_index):
    analyzer = Analyzer(AnalyzerSettings())
    theirs = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    theirs.index([analyzer.terms(row["contents"]) for row in ROWS], show_progress=False)
    loaded = bm25s.BM25.load(small_index / "bm25", mmap=True)
    for query in QUERIES[:4]:
        np.testing.assert_allclose(
            loaded.get_scores(analyzer.terms(query)), theirs.get_scores(analyzer.terms(query)), rtol=1e-5
        )


def test_results_do_not_depend_on_the_batch(small_index):
    index = Index(small_index)
    assert index.search(QUERIES, 5) == [index.search([q], 5)[0] for q in QUERIES]
    assert [hits[:2] for hits in index.search(QUERIES, 5)] == index.search(QUERIES, 2)


def test_equal_scores_go_by_row(tmp_path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": str(i), "contents": "same words here"}) + "\n" for i in range(50))
    )
    build_index(corpus, tmp_path / "i")
    assert [row for row, _ in Index(tmp_path / "i").ranker.rank(["words"], 7)[0]] == list(range(7))


def test_small_pieces_and_a_small_memory_budget_give_the_same_index(tmp_path, monkeypatch, small_index):
    monkeypatch.setattr(PostingsSink, "chunk_passages", 17)
    monkeypatch.setattr(bm25_build, "BUDGET_BYTES", 4096)
    build_index(CORPUS, tmp_path / "pieces")
    assert verify(tmp_path / "pieces").files == verify(small_index).files


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        ('["a"]', "a list instead of an object"),
        ('{"id": [1], "contents": "x"}', "not empty, or an integer, got a list"),
        ('{"id": 1.5, "contents": "x"}', "not empty, or an integer, got a numb"),
        ('{"id": "7"}', 'no "contents"'),
        ('{"id": "7", "contents": 3}', "expected `contents`: a string, got a number"),
        ('{"id": "7", "text": ""}', "`text` is empty; expected {"),
        ('{"id": "7", "question": "q", "answer": "a"}', "`question` makes it a question, and no passage"),
        ('{"id": "7", "contents": "\\ud800"}', "not JSON"),
    ],
)
def test_a_malformed_line_is_named_with_file_number_and_what_was_expected(tmp_path, line, reason):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "0", "contents": "good"}\n\n' + line + '\n{"id": "1", "contents": "good"}\n')
    with pytest.raises(UserError) as error:
        build_index(corpus, tmp_path / "i")
    message = str(error.value)
    assert (
        message.startswith(f"{corpus}, line 3: ")
        and reason in message
        and 'expected {"id": "0", "contents":' in message
    )
    assert error.value.exit_code == 2 and "\n" not in message
    info = build_index(corpus, tmp_path / "i", skip_bad=True)
    assert (info.passages, info.skipped) == (2, 1) and f"{corpus}, line 3:" in info.skipped_reasons[0]


def test_gzip_title_and_text_integers_and_a_byte_order_mark_are_read(tmp_path):
    corpus = tmp_path / "c.jsonl.gz"
    corpus.write_bytes(
        gzip.compress(b'\xef\xbb\xbf{"id": 5, "title": "T", "text": "body"}\n{"id": "6", "text": "plain"}')
    )
    assert [(p.id, p.contents) for p in read_corpus(corpus)] == [("5", '"T"\nbody'), ("6", "plain")]
    corpus.write_bytes(corpus.read_bytes()[:-12])
    with pytest.raises(UserError, match="damaged gzip file"):
        list(read_corpus(corpus))


def test_empty_missing_and_ambiguous_corpora_are_refused(tmp_path):
    corpus = tmp_path / "c.jsonl"
    with pytest.raises(UserError, match="no such file"):
        build_index(corpus, tmp_path / "i")
    corpus.write_text("\n\n")
    with pytest.raises(UserError, match="holds no passage"):
        build_index(corpus, tmp_path / "i")
    corpus.write_text(
        '{"id": "0", "contents": "a"}\n{"id": "1", "contents": "b"}\n{"id": "0", "contents": "c"}\n'
    )
    with pytest.raises(UserError, match=r"c\.jsonl, line 3: id '0' again, as on line 1"):
        build_index(corpus, tmp_path / "i")
    assert not (tmp_path / "i").exists()


def test_an_interrupted_build_leaves_the_same_repeated_ids_out(tmp_path, monkeypatch):
    corpus = tmp_path / "c.jsonl"
    ids = [0, 1, 0, 2, 1, 3, 4, 0, 5, 4]
    rows = [f'{{"id": {id}, "contents": "w{n}"}}\n' for n, id in enumerate(ids)]
    corpus.write_text("{bad}\n" + "".join(rows))
    monkeypatch.setattr(PostingsSink, "chunk_passages", 2)
    whole = build_index(corpus, tmp_path / "whole", skip_bad=True)
    assert (whole.passages, whole.skipped) == (6, 5)
    assert whole.skipped_reasons[1:] == [
        f"{corpus}, line 4: id '0' again; that on line 2 is kept",
        f"{corpus}, line 6: id '1' again; that on line 3 is kept",
    ]
    write, chunks = PostingsSink.write, []

    def breaks(self, texts):
        chunks.append(texts)
        if len(chunks) == 2:
            raise KeyboardInterrupt
        write(self, texts)

    monkeypatch.setattr(PostingsSink, "write", breaks)
    with pytest.raises(KeyboardInterrupt):
        build_index(corpus, tmp_path / "i", skip_bad=True)
    made = build_index(corpus, tmp_path / "i", skip_bad=True)
    assert list(chain(chunks[0], *chunks[2:])) == ["w0", "w1", "w3", "w5", "w6", "w8"]
    assert made.files == whole.files and (made.skipped, made.skipped_reasons) == (5, whole.skipped_reasons)


def test_bad_settings_say_what_is_accepted(tmp_path):
    for options, words in (
        ({"k1": 0}, "k1 must be a number above 0"),
        ({"b": 2}, "b from 0 to 1"),
        ({"language": "klingon"}, "english"),
        ({"backend": "x"}, "bm25"),
    ):
        with pytest.raises(UserError, match=words):
            build_index(CORPUS, tmp_path / "i", **options)


def test_a_corpus_of_nothing_but_stop_words_can_be_served(tmp_path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "0", "contents": "the of and"}\n{"id": "1", "contents": ""}\n')
    build_index(corpus, tmp_path / "i")
    assert Index(tmp_path / "i").search(["the", "and of", "x"], 3) == [[], [], []]


@pytest.mark.parametrize(
    "name",
    ["documents.jsonl", "documents.offsets", "bm25/data.csc.index.npy", "bm25/vocab.index.json", "meta.json"],
)
@pytest.mark.parametrize("damage", ["cut off", "changed", "missing"])
def test_a_torn_index_is_refused_with_the_file_and_the_reason(tmp_path, small_index, name, damage):
    index = tmp_path / "i"
    shutil.copytree(small_index, index)
    path = index / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            content[: len(content) // 2] if damage == "cut off" else content[:-40] + b"#" * 20 + content[-20:]
        )
    with pytest.raises(IndexInvalid) as error:
        Index(index)
    assert Path(name).name in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2


def test_an_index_refuses_another_corpus_and_other_settings(tmp_path, small_index):
    other = tmp_path / "other.jsonl"
    other.write_text(CORPUS.read_text("utf-8").replace("Aldersea", "Alderzea"))
    Index(small_index, CORPUS).close()
    with pytest.raises(IndexInvalid, match="built from another corpus"):
        Index(small_index, other)
    with pytest.raises(IndexInvalid, match="of another corpus"):
        build_index(other, small_index)
    with pytest.raises(IndexInvalid, match="other settings"):
        build_index(CORPUS, small_index, k1=1.2)
    assert build_index(CORPUS, small_index).passages == 186


def test_no_index_a_lucene_index_and_a_foreign_folder_are_refused(tmp_path):
    with pytest.raises(IndexInvalid, match="no such folder"):
        Index(tmp_path / "none")
    (tmp_path / "lucene").mkdir()
    (tmp_path / "lucene" / "segments_2").touch()
    with pytest.raises(IndexInvalid, match="Lucene"):
        Index(tmp_path / "lucene")
    with pytest.raises(IndexInvalid, match="exists and is no index"):
        build_index(CORPUS, tmp_path / "lucene")


def test_a_full_disk_is_said_before_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(
        EnvironmentLacks, match=r"disk of .* 0 MiB free, about 16 MiB needed for the build"
    ) as error:
        build_index(CORPUS, tmp_path / "i")
    assert error.value.exit_code == 3


@pytest.mark.slow
def test_a_build_killed_at_any_moment_goes_on_to_the_same_bytes(tmp_path, small_index):
    """kill -9 in the middle of the scan, three times, then a build to the end."""
    program = (
        "import sys, time; from retriever_service.indexing import build, sinks; "
        "sinks.PostingsSink.chunk_passages = 20\n"
        "def tell(stage, share, text):\n"
        "    if stage == 'scan': print(text, flush=True); time.sleep(.05)\n"
        "build.build_index(sys.argv[1], sys.argv[2], progress=tell)"
    )
    command = [sys.executable, "-c", program, str(CORPUS), str(tmp_path / "i")]
    seen = []
    for stop_after in (2, 2, 1):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            lines = [process.stdout.readline() for _ in range(stop_after + bool(seen))]
            os.kill(process.pid, signal.SIGKILL)
            seen.append(lines)
        assert not (tmp_path / "i").exists()
    assert (
        seen[0][0] == "20 passages\n"
        and seen[1][0].startswith("going on after ")
        and seen[2][0].startswith("going on after ")
    )
    with (tmp_path / "i.building" / "documents.jsonl").open("ab") as file:
        file.write(b"torn tail that was never committed")
    build_index(CORPUS, tmp_path / "i")
    assert verify(tmp_path / "i").files == verify(small_index).files
    assert not (tmp_path / "i.building").exists()


def test_two_builds_of_one_folder_do_not_mix(tmp_path):
    program = (
        "import sys, time, retriever_service.indexing.build as b; "
        "b.build_index(sys.argv[1], sys.argv[2], progress=lambda s, x, t: (print(s, flush=True), "
        "time.sleep(5 * (s == 'scan'))))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(CORPUS), str(tmp_path / "i")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            while process.stdout.readline() != "scan\n":
                time.sleep(0.01)
            with pytest.raises(EnvironmentLacks, match="another build"):
                build_index(CORPUS, tmp_path / "i")
        finally:
            process.kill()


def test_parquet_gives_the_same_index_and_a_broken_build_of_it_goes_on(tmp_path, small_index, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([row | {"other": 1} for row in ROWS]), path, row_group_size=30)
    monkeypatch.setattr(PostingsSink, "chunk_passages", 50)
    write, chunks = PostingsSink.write, []

    def breaks(self, texts):
        chunks.append(len(texts))
        if len(chunks) == 2:
            raise KeyboardInterrupt
        write(self, texts)

    monkeypatch.setattr(PostingsSink, "write", breaks)
    with pytest.raises(KeyboardInterrupt):
        build_index(path, tmp_path / "i")
    build_index(path, tmp_path / "i")
    made = dict(verify(tmp_path / "i").files)
    assert {made.pop(name)["bytes"] > 0 for name in ("fields.blocks", "fields.places")} == {True}  # `other`
    assert chunks == [50, 50, 50, 50, 36] and made == verify(small_index).files
    pq.write_table(pa.table({"id": ["1"], "words": ["x"]}), path)
    with pytest.raises(UserError, match=r'no "contents" .*; its columns are id, words; a text may be'):
        build_index(path, tmp_path / "j")
    pq.write_table(pa.table({"id": ["1", "2"], "text": ["x", None]}), path)
    with pytest.raises(UserError, match=r"row 2: `text` is empty"):
        build_index(path, tmp_path / "j")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged Parquet file"):
        build_index(path, tmp_path / "j")


@pytest.mark.slow
def test_pruning_changes_no_result_on_skewed_postings(tmp_path):
    """Short and long queries over common and rare words, in several ranges of rows, against adding everything
    up."""
    draw = np.random.default_rng(5)
    words = np.array([f"w{i}" for i in range(300)])
    chance = 1 / np.arange(1, 301)
    texts = [
        " ".join(draw.choice(words, draw.integers(1, 12), p=chance / chance.sum())) for _ in range(40_000)
    ]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(i), "contents": t}) + "\n" for i, t in enumerate(texts)))
    build_index(corpus, tmp_path / "i", language="none")
    queries = [" ".join(draw.choice(words, n)) for n in (1, 2, 3, 5, 9, 40, 200) for _ in range(3)]
    loaded = bm25s.BM25.load(tmp_path / "i" / "bm25")
    for topk in (1, 3, 50):
        for query, ranked in zip(queries, Index(tmp_path / "i").ranker.rank(queries, topk), strict=True):
            scores = loaded.get_scores(query.split())
            best = np.lexsort((np.arange(len(scores)), -np.round(scores, 4)))[:topk]
            np.testing.assert_allclose([s for _, s in ranked], scores[best], rtol=1e-5)
            np.testing.assert_allclose(scores[[row for row, _ in ranked]], [s for _, s in ranked], rtol=1e-5)


def test_stop_words_are_those_that_indexes_were_built_without(monkeypatch):
    """An index holds none of them: a list that changes would make old indexes miss words of queries."""
    assert set(bm25s.stopwords.STOPWORDS_EN) == ENGLISH and len(ENGLISH) == 33
    sizes = {language: len(stop_words(language)) for language in OTHERS}
    assert sizes["german"] == len(set(bm25s.stopwords.STOPWORDS_GERMAN)) and min(sizes.values()) > 30, sizes
    assert stop_words("finnish") == frozenset()
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert stop_words("english") == ENGLISH
    with pytest.raises(EnvironmentLacks, match=r"stop words of language 'german': .*\[languages\]"):
        stop_words("german")


@pytest.mark.parametrize(
    ("language", "passage", "query"),
    [
        ("turkish", "İSTANBUL ve ISPARTA", "istanbul"),
        ("turkish", "İSTANBUL ve ISPARTA", "ısparta"),
        ("english", "the port of İzmir", "izmir"),
        ("hindi", "दिल्ली की किताबें", "किताबें"),
        ("tamil", "தமிழ் மொழி", "தமிழ்"),
        ("french", "un cafe\u0301 noir", "caf\u00e9"),
        ("french", "un caf\u00e9 noir", "cafe\u0301"),
        ("german", "Die Brücken über den Fluß", "BRÜCKEN"),
        ("russian", "Москва — столица", "МОСКВА"),
        ("none", "Ελλάδα", "ΕΛΛΆΔΑ"),
    ],
)
def test_words_of_other_languages_are_whole_and_found_in_whatever_form_they_are_written(
    tmp_path, language, passage, query
):
    corpus = tmp_path / "c.jsonl"
    rows = [{"id": "x", "contents": passage}, {"id": "y", "contents": "क का கா stan e\u0301 zmir"}]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index(corpus, tmp_path / "i", language=language)
    index = Index(tmp_path / "i")
    assert [json.loads(d)["id"] for d, _ in index.search([query], 3)[0]] == ["x"]
    assert len(Analyzer(AnalyzerSettings(language)).terms(query)) == 1


def test_texts_of_latin_letters_go_by_the_fast_pattern_and_no_mark_is_lost(monkeypatch):
    """The one that looks for marks is eight times as slow: half of Wikipedia's passages have a dash or an
    accent."""
    for character in map(chr, range(0x20000)):
        if unicodedata.category(character) in ("Mn", "Mc"):
            assert analysis._MAY_HAVE_MARKS.search(character), hex(ord(character))
    analyzer = Analyzer(AnalyzerSettings("french"))
    assert analyzer.words("कि Café") == ["कि", "café"]
    monkeypatch.setattr(analysis, "_marked_word", None)
    assert analyzer.words("Un café – noir, dit l’Œuvre") == ["un", "café", "noir", "dit", "l", "œuvre"]
    assert analyzer.words("cafe\u0301") == ["café"]


def test_turkish_queries_share_a_cached_answer_only_where_their_letters_are_the_same(tmp_path):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "x", "contents": "ılık"}\n')
    build_index(corpus, tmp_path / "i", language="turkish")
    same = Index(tmp_path / "i").normalise
    assert same("ILIK") == same("ılık") != same("ilik") == same("İLİK")


@pytest.mark.parametrize(
    "key", ["corpus_sha256", "corpus_bytes", "skipped", "skipped_reasons", "files", "passages"]
)
def test_a_description_that_lacks_a_key_is_damaged(tmp_path, small_index, key):
    meta = json.loads((small_index / "meta.json").read_text())
    del meta[key]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(IndexInvalid, match=rf"damaged \(it lacks {key}\)"):
        read_info(tmp_path)
