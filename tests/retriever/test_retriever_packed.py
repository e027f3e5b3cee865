"""Packed postings: exact results over many windows, additions, deletions and merges, and processes that are
killed at chosen moments."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from retriever_service.__main__ import main
from retriever_service.bm25.analysis import AnalyzerSettings
from retriever_service.bm25.packed import build as runs
from retriever_service.bm25.packed.kernel import WINDOW
from retriever_service.bm25.packed.search import Deleted, PackedRanker
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import read_info, verify
from retriever_service.indexing import changes
from retriever_service.indexing.build import build_index
from retriever_service.indexing.changes import add_to_index, delete_from_index, read_ids
from retriever_service.indexing.merge import merge_index
from retriever_service.ranking import Statistics
from retriever_service.search.index import Index
from services.common.errors import EnvironmentLacks, UserError
from tests.retriever.retriever_fixtures import CORPUS, small_index  # noqa: F401

LINES = CORPUS.read_text("utf-8").splitlines(keepends=True)
QUERIES = [
    "Which river flows past Morwen?",
    "the weaver born in Aldersea weaver",
    "mayor chosen by the Blue Lantern",
    "largest house of Fennick houses houses",
    "Übersee café Århus",
    "town",
    "nothingofthekind",
]
PLAIN = AnalyzerSettings(language="none")


def part(folder: Path, name: str, lines: list[str]) -> Path:
    (folder / name).write_text("".join(lines), "utf-8")
    return folder / name


def answers(index: Path, topk: int = 20) -> list:
    opened = Index(index)
    found = opened.search(QUERIES, topk)
    opened.close()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """All passages, built at once."""
    folder = tmp_path_factory.mktemp("whole")
    build_index(CORPUS, folder / "i", postings="packed")
    return folder / "i"


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    """Postings of 300,000 rows in two runs, of terms in nearly every row and in one, with a few very long
    lists of frequencies; the folder, and (rows, term frequencies) of each term."""
    folder = tmp_path_factory.mktemp("skewed")
    draw = np.random.default_rng(11)
    n_rows = 300_000
    shares = [0.7, 0.3, 0.1, 0.1, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001, *[1e-4] * 15, *[1e-5] * 15]
    lists = []
    for share in shares:
        rows = np.flatnonzero(draw.random(n_rows) < share)
        if len(rows) == 0:
            rows = np.array([7])
        tfs = np.where(draw.random(len(rows)) < 0.001, 65_535, draw.geometric(0.6, len(rows)))
        lists.append((rows, tfs))
    lengths = np.maximum(draw.poisson(40, n_rows), 1).astype(np.uint32)
    files = {name: (folder / name).open("wb") for name in runs.RUN_FILES}
    for low, high in ((0, 123_457), (123_457, n_rows)):
        counts = []
        for rows, tfs in lists:
            own = (rows >= low) & (rows < high)
            counts.append(int(own.sum()))
            files[runs.RUN_ROWS].write(rows[own].astype(np.uint32).tobytes())
            files[runs.RUN_TFS].write(tfs[own].astype(np.uint16).tobytes())
        terms = np.flatnonzero(counts)
        files[runs.RUN_TERMS].write(terms.astype(np.uint32).tobytes())
        files[runs.RUN_COUNTS].write(np.array(counts)[terms].astype(np.uint32).tobytes())
        files[runs.RUN_SIZES].write(np.array([len(terms), sum(counts)], np.uint64).tobytes())
    files[runs.RUN_LENGTHS].write(lengths.tobytes())
    files[runs.RUN_VOCABULARY].write("".join(f"w{i}\n" for i in range(len(shares))).encode())
    for file in files.values():
        file.close()
    runs.write_packed(folder, k1=0.9, b=0.4, progress=lambda done, of: None)
    return folder, lists, lengths


@pytest.fixture(scope="module")
def without_impacts(skewed, tmp_path_factory):
    """The same, as earlier versions built it."""
    folder = tmp_path_factory.mktemp("earlier")
    shutil.copytree(skewed[0] / "bm25", folder / "bm25", ignore=shutil.ignore_patterns("impacts.*"))
    return folder


@pytest.mark.parametrize("impacts", [True, False])
@pytest.mark.parametrize(
    ("topk", "n_queries", "mean"),
    [(3, 200, 40.0), (50, 24, 40.0), (100, 12, 40.0), (3, 60, 55.0), (3, 60, 31.0)],
)
def test_results_equal_adding_everything_up(skewed, without_impacts, topk, n_queries, mean, impacts):
    """Rows, scores and order, to the bit, over 74 windows, also where other passages have moved the mean
    length since."""
    folder, lists, lengths = skewed
    assert len(lengths) > 70 * WINDOW
    ranker = PackedRanker([folder if impacts else without_impacts], PLAIN, k1=0.9, b=0.4)
    own = [segment.files.impacts for segment in ranker._segments]
    assert [found is not None and len(found.terms) > 5 for found in own] == [impacts]
    if mean != 40.0:
        ranker.statistics = Statistics(len(lengths), round(mean * len(lengths)))
    else:
        mean = int(lengths.sum()) / len(lengths)
    norm = 0.9 * (1 - 0.4 + 0.4 * lengths / mean)
    idfs = [float(np.log(1 + (len(lengths) - len(r) + 0.5) / (len(r) + 0.5))) for r, _ in lists]
    draw = np.random.default_rng(topk)
    queries = [draw.integers(0, len(lists), size).tolist() for size in [1, 2, 3, 5, 8, 13] * 34][:n_queries]
    ranked = ranker.rank([" ".join(f"w{term}" for term in query) for query in queries], topk)
    for query, found in zip(queries, ranked, strict=True):
        scores = np.zeros(len(lengths), np.float32)
        counts = Counter(query)
        for term in sorted(counts, key=lambda term: -counts[term] * idfs[term]):
            rows, tfs = lists[term]
            own = (idfs[term] * tfs / (tfs + norm[rows])).astype(np.float32)
            scores[rows] += np.float32(counts[term]) * own
        matches = np.flatnonzero(scores)
        least = np.partition(scores, len(scores) - topk)[len(scores) - topk]
        matches = matches[scores[matches] >= least]
        best = matches[np.lexsort((matches, -scores[matches]))][:topk]
        assert found == list(zip(best.tolist(), scores[best].tolist(), strict=True)), query


def test_deleted_rows_are_passed_over_among_impacts(skewed):
    folder, _, lengths = skewed
    query = ["w0 w2 w4 w6"]
    (found,) = PackedRanker([folder], PLAIN, k1=0.9, b=0.4).rank(query, 12)
    deleted = sorted(row for row, _ in found[1:9:2])
    ranker = PackedRanker([folder], PLAIN, k1=0.9, b=0.4, deleted=Deleted(deleted))
    ranker.statistics = Statistics(len(lengths), int(lengths.sum()))
    assert ranker.rank(query, 8) == [[hit for hit in found if hit[0] not in deleted]]


def test_ranks_are_those_of_the_other_format(small_index, whole):
    plain = Index(small_index).ranker.rank(QUERIES, 20)
    packed = Index(whole).ranker.rank(QUERIES, 20)
    assert [[row for row, _ in one] for one in packed] == [[row for row, _ in one] for one in plain]
    for one, other in zip(packed, plain, strict=True):
        assert [s for _, s in one] == pytest.approx([s for _, s in other], rel=1e-6)
    assert (read_info(small_index).format, read_info(whole).format) == (2, 3)


def test_additions_give_the_scores_of_one_index_and_a_merge_its_bytes(tmp_path, whole):
    build_index(part(tmp_path, "a", LINES[:100]), tmp_path / "i", postings="packed")
    add_to_index(tmp_path / "i", part(tmp_path, "b", LINES[100:150]))
    info = add_to_index(tmp_path / "i", part(tmp_path, "c", LINES[150:]))
    assert info.passages == 186 and info.segments == ["segments/0001", "segments/0002"]
    assert answers(tmp_path / "i") == answers(whole)
    serving = Index(tmp_path / "i")
    merge_index(tmp_path / "i")
    assert verify(tmp_path / "i").files == verify(whole).files
    assert serving.search(QUERIES, 20) == answers(tmp_path / "i") == answers(whole)  # as it was opened
    assert not (tmp_path / "i.building").exists()
    assert merge_index(tmp_path / "i").passages == 186


def test_what_is_deleted_counts_no_more_before_and_after_a_merge(tmp_path):
    ids = [json.loads(line)["id"] for line in LINES]
    first = ids[3:90:4]
    then = ids[1:180:7]
    then = [i for i in then if i not in first]
    left = [line for line, i in zip(LINES, ids, strict=True) if i not in {*first, *then}]
    build_index(part(tmp_path, "left", left), tmp_path / "left_i", postings="packed")
    build_index(part(tmp_path, "a", LINES[:100]), tmp_path / "i", postings="packed")
    delete_from_index(tmp_path / "i", first)
    add_to_index(tmp_path / "i", part(tmp_path, "b", LINES[100:]))
    info = delete_from_index(tmp_path / "i", then)
    expected = answers(tmp_path / "left_i")
    assert info.passages == len(left) and answers(tmp_path / "i") == expected
    opened = Index(tmp_path / "i")
    assert opened.rows.find(first[0]) == [] and opened.rows.whole(opened.search(["town"], 1)[0][0][0])["id"]
    with pytest.raises(UserError, match=rf"no passage with the id '{first[0]}'; nothing was deleted"):
        delete_from_index(tmp_path / "i", [ids[0], first[0]])
    assert merge_index(tmp_path / "i").passages == len(left) and answers(tmp_path / "i") == expected


def test_what_an_index_does_not_take_is_one_line(tmp_path, whole, small_index):
    same = part(tmp_path, "same", ['{"id": "x", "contents": "new"}\n', LINES[3]])
    build_index(part(tmp_path, "a", LINES[:50]), tmp_path / "i", postings="packed")
    with pytest.raises(
        UserError,
        match=r"same, line 2: id '.*' is in the index .* already; 1 passage of it is there by id",
    ):
        add_to_index(tmp_path / "i", same)
    delete_from_index(tmp_path / "i", [json.loads(LINES[3])["id"]])
    assert add_to_index(tmp_path / "i", same).passages == 51
    with pytest.raises(IndexInvalid, match="another corpus"):
        build_index(tmp_path / "a", tmp_path / "i", postings="packed")
    for change in (lambda: add_to_index(small_index, same), lambda: merge_index(small_index)):
        with pytest.raises(IndexInvalid, match="only bm25 indexes of packed postings"):
            change()
    with pytest.raises(UserError, match="postings 'zip': accepted are auto, bm25s, packed"):
        build_index(tmp_path / "a", tmp_path / "j", postings="zip")


@pytest.mark.parametrize(
    "name", ["segments/0001/bm25/postings.words", "deletions.1.json", "bm25/blocks.first"]
)
def test_a_torn_part_is_refused_with_its_name(tmp_path, name):
    build_index(part(tmp_path, "a", LINES[:50]), tmp_path / "i", postings="packed")
    add_to_index(tmp_path / "i", part(tmp_path, "b", LINES[50:60]))
    delete_from_index(tmp_path / "i", [json.loads(LINES[3])["id"]])
    content = (tmp_path / "i" / name).read_bytes()
    (tmp_path / "i" / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(IndexInvalid, match=rf"{name}: \d+ bytes instead of {len(content)}"):
        Index(tmp_path / "i")


def test_a_line_of_a_file_of_ids_is_one_id(tmp_path):
    """Line breaks of Unicode's inside an id made two other ids of it, whose passages were deleted."""
    odd = ["x\u2028y", "x\x85y", "x\x0cy", "é日本"]
    rows = [{"id": i, "contents": f"river {n}"} for n, i in enumerate(["x", "y", *odd])]
    corpus = part(tmp_path, "a", [json.dumps(row) + "\n" for row in rows])
    build_index(corpus, tmp_path / "i", postings="packed")
    (tmp_path / "ids").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(odd).encode() + b"\n\n")
    assert read_ids(tmp_path / "ids") == odd
    assert delete_from_index(tmp_path / "i", read_ids(tmp_path / "ids")).passages == 2
    opened = Index(tmp_path / "i")
    assert [opened.rows.find(i) for i in ("x", "y", odd[0])] == [[0], [1], []]


def test_nobody_else_changes_an_index_between_the_move_of_an_addition_and_its_count(tmp_path, monkeypatch):
    """What another command had read by then would be committed over the addition."""
    build_index(part(tmp_path, "a", LINES[:100]), tmp_path / "i", postings="packed")
    second = part(tmp_path, "b", LINES[100:110])
    third = part(tmp_path, "c", LINES[110:120])
    refused = []

    def tidy(folder: Path) -> None:
        whole_tidy(folder)
        for change in (
            lambda: add_to_index(tmp_path / "i", third),
            lambda: delete_from_index(tmp_path / "i", [json.loads(LINES[0])["id"]]),
            lambda: merge_index(tmp_path / "i"),
        ):
            with pytest.raises(EnvironmentLacks, match="another build is at work in it"):
                change()
            refused.append(change)

    whole_tidy = changes.tidy
    monkeypatch.setattr(changes, "tidy", tidy)
    add_to_index(tmp_path / "i", second)
    monkeypatch.undo()
    assert len(refused) == 3
    assert add_to_index(tmp_path / "i", third).passages == 120


def test_another_build_does_not_take_the_only_copy_of_an_index(tmp_path):
    """A merge that is killed between its two renames leaves the index inside its own folder."""
    corpus = part(tmp_path, "a", LINES[:50])
    build_index(corpus, tmp_path / "i", postings="packed")
    before = answers(tmp_path / "i")
    (tmp_path / "i.building").mkdir()
    (tmp_path / "i.building" / "lock").touch()
    (tmp_path / "i").rename(tmp_path / "i.building" / "replaced")
    with pytest.raises(IndexInvalid, match="holds an index of another corpus"):
        build_index(part(tmp_path, "b", LINES[50:]), tmp_path / "i", postings="packed")
    assert answers(tmp_path / "i") == before


def test_a_link_to_an_index_stays_one(tmp_path):
    (tmp_path / "far").mkdir()
    build_index(part(tmp_path, "a", LINES[:50]), tmp_path / "far" / "i", postings="packed")
    (tmp_path / "i").symlink_to(tmp_path / "far" / "i")
    add_to_index(tmp_path / "i", part(tmp_path, "b", LINES[50:60]))
    delete_from_index(tmp_path / "i", [json.loads(LINES[0])["id"]])
    assert merge_index(tmp_path / "i").passages == 59
    assert (tmp_path / "i").is_symlink() and read_info(tmp_path / "far" / "i").passages == 59
    corpus = part(tmp_path, "b", LINES[50:])
    assert build_index(corpus, tmp_path / "i", postings="packed", overwrite=True).passages == 136
    assert (tmp_path / "i").is_symlink() and read_info(tmp_path / "far" / "i").passages == 136
    assert [p.name for p in (tmp_path / "far").iterdir()] == ["i"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "far", "i"]


CHILD = """
import os, signal, sys
from pathlib import Path
from retriever_service.bm25.packed import build as runs
from retriever_service.indexing import build, changes, merge, sinks
point, do, folder = sys.argv[1:]
folder = Path(folder)
runs.SPAN_POSTINGS = 300
sinks.RunsSink.chunk_passages = 20
seen = {}
def count(name):
    seen[name] = seen.get(name, 0) + 1
    if point == f"{name}:{seen[name]}":
        os.kill(os.getpid(), signal.SIGKILL)
def tell(stage, share, text):
    count(stage)
rename = os.rename
def renames(*names):
    count("before rename")
    rename(*names)
    count("after rename")
if point != "-":
    os.rename = renames
if do == "build":
    build.build_index(folder / "a", folder / "i", postings="packed", progress=tell)
if do == "add":
    changes.add_to_index(folder / "i", folder / "b", progress=tell)
if do == "merge":
    merge.merge_index(folder / "i", progress=tell)
"""


@pytest.mark.slow
def test_whatever_is_killed_goes_on_and_nothing_half_written_is_opened(tmp_path, whole):
    """kill -9 in the scan, in the merge of runs, and beside the renames."""

    def run(point: str, do: str) -> int:
        return subprocess.run(
            [sys.executable, "-c", CHILD, point, do, str(tmp_path)],
            cwd=ROOT,
            timeout=120,
        ).returncode

    part(tmp_path, "a", LINES[:100])
    part(tmp_path, "b", LINES[100:])
    for point in ("scan:3", "merge:3"):
        assert run(point, "build") == -signal.SIGKILL
        with pytest.raises(IndexInvalid, match=r"i: no such folder; `unspiral index build"):
            Index(tmp_path / "i")
    assert run("-", "build") == 0
    before = answers(tmp_path / "i")
    for point in ("merge:2", "after rename:1"):
        assert run(point, "add") == -signal.SIGKILL
        assert answers(tmp_path / "i") == before and read_info(tmp_path / "i").segments == []
    assert run("-", "add") == 0
    expected = answers(whole)
    for point in ("copy:2", "merge:2", "merge:1", "before rename:1"):
        assert run(point, "merge") == -signal.SIGKILL
        assert answers(tmp_path / "i") == expected and read_info(tmp_path / "i").segments
    assert run("after rename:1", "merge") == -signal.SIGKILL
    with pytest.raises(IndexInvalid, match="the command that was replacing it was killed; give that command"):
        Index(tmp_path / "i")
    assert run("-", "merge") == 0
    assert answers(tmp_path / "i") == expected and not read_info(tmp_path / "i").segments
    assert verify(tmp_path / "i").files.keys() == verify(whole).files.keys()
    assert not (tmp_path / "i.building").exists()


def test_the_commands(tmp_path, monkeypatch, capsys):
    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["retriever", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == 0
        return capsys.readouterr().out

    part(tmp_path, "a", LINES[:100])
    part(tmp_path, "b", LINES[100:])
    (tmp_path / "ids").write_text(json.loads(LINES[0])["id"] + "\n")
    index = tmp_path / "i"
    assert "100 passages" in run(
        "index", "build", "--corpus", tmp_path / "a", "--out", index, "--postings", "packed"
    )
    assert "186 passages" in run("index", "add", index, "--corpus", tmp_path / "b")
    assert "184 passages" in run(
        "index", "delete", index, "--id", json.loads(LINES[150])["id"], "--ids", tmp_path / "ids"
    )
    assert "184 passages" in run("index", "merge", index)
    assert json.loads(run("index", "info", index, "--json"))["segments"] == []
    assert "score" in run("index", "search", "town", "--index", index)


def test_a_merge_that_an_earlier_version_began_goes_on(tmp_path, whole, monkeypatch):
    """It wrote the postings as runs first, which are used no more and take no place on the disk."""

    def killed(*given, **options):
        raise KeyboardInterrupt

    build_index(part(tmp_path, "a", LINES[:100]), tmp_path / "i", postings="packed")
    add_to_index(tmp_path / "i", part(tmp_path, "b", LINES[100:]))
    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_packed", killed)
        with pytest.raises(KeyboardInterrupt):
            merge_index(tmp_path / "i")
    left = {path.name for path in (tmp_path / "i.building").glob("run.*")}
    assert left == {runs.RUN_LENGTHS, runs.RUN_VOCABULARY, "run.done"}
    for name in {*runs.RUN_FILES} - left:
        (tmp_path / "i.building" / name).write_bytes(b"run" * 1000)
    seen = []
    merge_index(tmp_path / "i", progress=lambda *said: seen.append(folder_of(tmp_path / "i.building")))
    assert not any(name.startswith("run.") for names in seen[-2:] for name in {*names} - left)
    assert verify(tmp_path / "i").files == verify(whole).files


def folder_of(work: Path) -> set[str]:
    return {path.name for path in work.glob("*")}


def test_a_merge_numbers_terms_as_a_build_of_what_is_left(tmp_path):
    """Terms that the first segment lost, has again, or never had; and three segments."""
    rows = ["red red blue", "green", "blue grey", "green white", "black red", "white black pink", "blue"]
    lines = [json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(rows)]
    build_index(part(tmp_path, "a", lines[:3]), tmp_path / "i", postings="packed")
    add_to_index(tmp_path / "i", part(tmp_path, "b", lines[3:5]))
    add_to_index(tmp_path / "i", part(tmp_path, "c", lines[5:]))
    delete_from_index(tmp_path / "i", ["1", "5"])
    merge_index(tmp_path / "i")
    build_index(part(tmp_path, "d", [*lines[:1], *lines[2:5], lines[6]]), tmp_path / "j", postings="packed")
    assert (tmp_path / "i/bm25/terms.text").read_text() == "red\nblue\ngrey\ngreen\nwhite\nblack\n"
    assert verify(tmp_path / "i").files == verify(tmp_path / "j").files
