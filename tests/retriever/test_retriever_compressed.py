"""Vectors compressed into inverted lists, with candidates scored again by the exact ones; made in bounded
memory, and gone on with after a kill. Vectors are made (benchmarks/made_vectors.py)."""

from __future__ import annotations

import json
import mmap
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

from benchmarks.made_vectors import Made, blocks, write_flat
from retriever_service.dense import build, exact, inverted
from retriever_service.dense.build import make_type
from retriever_service.dense.exact import FILE as EXACT
from retriever_service.dense.exact import ExactVectors
from retriever_service.dense.inverted import write_inverted
from retriever_service.dense.lists import attach
from retriever_service.dense.search import DenseRanker, open_faiss, set_search_effort
from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.description import verify
from retriever_service.indexing.convert import convert_index
from retriever_service.search.index import Index
from services.common.errors import UserError

faiss = pytest.importorskip("faiss")

COUNT = 20_000
WIDTH = 64
TOPK = 3
MADE = Made(WIDTH)


class GivenVectors:
    """In place of an encoder: queries are numbers of vectors."""

    dimension = WIDTH

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors = vectors

    def queries(self, texts: list[str]) -> np.ndarray:
        return self._vectors[[int(text) for text in texts]]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """`e5_Flat.index`, and the corpus that it belongs to."""
    folder = tmp_path_factory.mktemp("published")
    write_flat(MADE, COUNT, folder / "e5_Flat.index")
    with (folder / "corpus.jsonl").open("w") as file:
        for row in range(COUNT):
            file.write(json.dumps({"id": str(row), "contents": f'"t"\npassage {row}'}) + "\n")
    return folder


@pytest.fixture(scope="module")
def questions() -> np.ndarray:
    every = np.concatenate([*blocks(MADE, COUNT)])
    return MADE.questions(every[:: COUNT // 300])


@pytest.fixture(scope="module")
def truth(published, questions) -> np.ndarray:
    plain = faiss.read_index(str(published / "e5_Flat.index"))  # FAISS itself reads what was written
    assert plain.ntotal == COUNT and plain.d == WIDTH
    return plain.search(questions, TOPK)[1]


def convert(published: Path, out: Path, kind: str = "IVF,SQ8", **options):
    return convert_index(
        published / "e5_Flat.index", out, kind, corpus=published / "corpus.jsonl",
        **({"nprobe": 32, "rescore": 10, "sample": 100} | options),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "share"),
    [
        ("IVF,SQ8", "float16", 0.85),
        ("IVF,SQ4", "float32", 1.3),
        ("IVF_HNSW32,PQ32x4fsr", "float16", 0.75),
        ("SQ8", "float16", 0.8),
    ],
)
def test_recall_of_the_exact_search_is_kept(tmp_path, published, questions, truth, kind, dtype, share):
    info, recall = convert(published, tmp_path / "c", kind, rescore_dtype=dtype)
    assert recall[3] >= 0.97 and info.settings["rescore"] == 10
    ranker = DenseRanker(
        tmp_path / "c/dense/faiss.index", GivenVectors(questions), COUNT, nprobe=32, rescore=10,
        rescore_dtype=dtype,
    )  # fmt: skip
    found = ranker.rank([str(i) for i in range(len(questions))], TOPK)
    kept = [len({row for row, _ in one} & {*rows}) / TOPK for one, rows in zip(found, truth, strict=True)]
    assert np.mean(kept) >= 0.97
    every = np.concatenate([*blocks(MADE, COUNT)])
    for i, one in enumerate(found[:20]):
        exact = [float(every[row] @ questions[i]) for row, _ in one]
        assert [score for _, score in one] == pytest.approx(exact, abs=2e-3 if dtype == "float16" else 1e-6)
        assert [score for _, score in one] == sorted((score for _, score in one), reverse=True)
    size = sum(path.stat().st_size for path in (tmp_path / "c/dense").iterdir())
    assert size < share * (published / "e5_Flat.index").stat().st_size


@pytest.mark.parametrize(("kind", "residual"), [("IVF,PQ32x4fsr", True), ("IVF,PQ32x4fs", False)])
def test_fast_scans_are_of_codes_that_lie_on_the_disk_as_those_of_the_plain_type(
    tmp_path, published, questions, kind, residual
):
    convert(published, tmp_path / "c", kind)
    place = tmp_path / "c/dense/faiss.index"
    plain = faiss.read_index(str(place))
    assert type(plain) is faiss.IndexIVFPQ and plain.by_residual is residual
    attach(faiss, plain, place)
    fast = open_faiss(place)
    assert type(fast) is faiss.IndexIVFPQFastScan and fast.ntotal == COUNT
    found = []
    for index in (plain, fast):
        set_search_effort(index, 32, None)
        found.append(index.search(questions, 30)[1].tolist())
    shared = [len({*a} & {*b}) / 30 for a, b in zip(*found, strict=True)]
    assert np.mean(shared) > 0.9, "a fast scan rounds its tables, no more"


def test_the_rows_that_are_scored_again_are_asked_of_the_disk_before_they_are_read(tmp_path, monkeypatch):
    asked = []

    class Told(mmap.mmap):
        def madvise(self, advice, begin, length):
            asked.append((advice, begin, length))
            super().madvise(advice, begin, length)

    monkeypatch.setattr(exact, "mmap", SimpleNamespace(**vars(mmap) | {"mmap": Told}))
    rows = np.random.default_rng(0).standard_normal((200, 300), np.float32)
    (tmp_path / exact.FILE).write_bytes(rows.tobytes())
    vectors = exact.ExactVectors(tmp_path / exact.FILE, "float32", 300, 200)
    found = vectors.best(rows[7], np.array([150, 7, -1, 199]), 2)
    assert found[0] == (7, pytest.approx(rows[7] @ rows[7])) and len(found) == 2
    width = 4 * 300
    for (advice, begin, length), row in zip(asked, (7, 150, 199), strict=True):
        assert advice == mmap.MADV_WILLNEED and begin % mmap.PAGESIZE == 0
        assert row * width - begin < mmap.PAGESIZE and begin + length == (row + 1) * width


def test_without_exact_scores_the_same_lists_keep_less(tmp_path, published, questions, truth):
    convert(published, tmp_path / "c", "IVF,SQ4")
    index = open_faiss(tmp_path / "c/dense/faiss.index")
    set_search_effort(index, 32, None)
    _, rows = index.search(questions, TOPK)
    kept = np.mean([len({*a} & {*b}) / TOPK for a, b in zip(rows.tolist(), truth.tolist(), strict=True)])
    assert kept < 0.97


def test_a_graph_over_the_lists_finds_nearly_those_that_all_of_them_give(
    tmp_path, published, questions, truth
):
    """By default; a front that is told to be narrow finds fewer."""
    convert(published, tmp_path / "c", "IVF_HNSW32,SQ8")
    index = open_faiss(tmp_path / "c/dense/faiss.index")
    assert index.nlist == 512

    def kept(ef_search: int | None) -> float:
        set_search_effort(index, 32, ef_search)
        _, rows = index.search(questions, TOPK * 10)
        return np.mean([len({*a} & {*b}) / TOPK for a, b in zip(rows.tolist(), truth.tolist(), strict=True)])

    assert kept(None) >= 0.97 > kept(1)


def test_blocks_of_any_size_give_the_same_lists(tmp_path, published, monkeypatch):
    convert(published, tmp_path / "whole")
    monkeypatch.setitem(write_inverted.__kwdefaults__, "block_rows", 7_000)
    convert(published, tmp_path / "parts")
    assert not (tmp_path / "parts/lists").exists()
    names = [path.name for path in sorted((tmp_path / "whole/dense").iterdir())]
    assert names == ["exact.vectors", "faiss.index", "lists.ivfdata", "lists.sizes"]
    ours, theirs = (verify(tmp_path / name).files for name in ("whole", "parts"))
    for name in names:  # rows of a list go up, however they came
        assert ours[f"dense/{name}"] == theirs[f"dense/{name}"], name


class _Killed(BaseException):
    """Nothing handles it, as nothing handles a kill."""


def test_what_is_half_done_is_never_removed_in_part_and_then_gone_on_from(tmp_path, monkeypatch):
    """Killed in the removal at the end, when the quantiser is gone and its lists are not yet. Another sample
    stands for a quantiser that learns other bits the second time."""
    vectors = Made(32).chunk(0)[:3_000]
    names = ("faiss.index", "lists.ivfdata", "lists.sizes")

    def write(name: str, sample: np.ndarray) -> list[bytes]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with monkeypatch.context() as patched:
            patched.setattr(inverted, "_sample", lambda *words: sample)
            write_inverted(
                make_type(32, "IVF,SQ8", len(vectors)), "IVF,SQ8",
                lambda begin, size: np.ascontiguousarray(vectors[begin : begin + size]), len(vectors),
                folder, tmp_path / f"{name}.lists", lambda done, of: None, block_rows=1_000,
            )  # fmt: skip
        return [(folder / one).read_bytes() for one in names]

    def dies(path: Path, **options) -> None:
        if path.exists():
            (path / "trained.index").unlink()
            raise _Killed

    other = np.ascontiguousarray(vectors[::-1])
    whole = write("whole", vectors)
    assert write("other", other) != whole
    with monkeypatch.context() as patched:
        patched.setattr(inverted.shutil, "rmtree", dies)
        with pytest.raises(_Killed):
            write("killed", vectors)
    assert write("killed", other) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "other", "whole"]


CHILD = """
import os, signal, sys
from retriever_service.dense import build, inverted
from retriever_service.indexing.convert import convert_index
point, source, out, kind, rescore = sys.argv[1:]
inverted.write_inverted.__kwdefaults__["block_rows"] = 4_000
build._BLOCK_ROWS = 4_000
seen = {}
def count(name):
    seen[name] = seen.get(name, 0) + 1
    if point == f"{name}:{seen[name]}":
        os.kill(os.getpid(), signal.SIGKILL)
def tell(stage, share, text):
    count(stage)
merge = inverted._merge
def merges(*words):
    count("before merge")
    merge(*words)
    count("after merge")
inverted._merge = merges
convert_index(f"{source}/e5_Flat.index", out, kind, corpus=f"{source}/corpus.jsonl", nprobe=32,
              rescore=int(rescore), sample=50, progress=tell)
print(seen)
"""


LISTS = ("IVF,SQ8", "10")


@pytest.mark.slow
def test_a_conversion_that_is_killed_goes_on_and_nothing_half_made_is_opened(tmp_path, published):
    def run(point: str, *form: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", CHILD, point, str(published), str(tmp_path / "c"), *(form or LISTS)],
            cwd=ROOT, timeout=180, capture_output=True, text=True,
        )  # fmt: skip

    # Exact vectors come in 5 blocks, then as many blocks of lists.
    for point in ("vectors:3", "vectors:7", "before merge:1", "after merge:1"):
        assert run(point).returncode == -signal.SIGKILL, point
        with pytest.raises(IndexInvalid, match="no such folder"):
            Index(tmp_path / "c")
    blocks_made = [*(tmp_path / "c.building/lists").glob("0*.index")]
    assert len(blocks_made) == 5
    done = run("-")
    assert done.returncode == 0, done.stderr
    convert(published, tmp_path / "whole")
    assert verify(tmp_path / "c").files == verify(tmp_path / "whole").files
    assert not (tmp_path / "c.building").exists()
    shutil.rmtree(tmp_path / "c")
    # Codes that go to the disk as they come: half of them are no index, and the next try writes all anew.
    assert run("vectors:3", "SQ8", "0").returncode == -signal.SIGKILL
    with pytest.raises(IndexInvalid, match="no such folder"):
        Index(tmp_path / "c")
    assert run("-", "SQ8", "0").returncode == 0
    convert(published, tmp_path / "codes", "SQ8", rescore=0)
    assert verify(tmp_path / "c").files == verify(tmp_path / "codes").files


@pytest.mark.parametrize("kind", ["SQ8", "SQ4", "SQfp16"])
def test_codes_that_go_to_the_disk_as_they_come_give_the_file_of_faiss(
    tmp_path, published, monkeypatch, kind
):
    monkeypatch.setattr(build, "_BLOCK_ROWS", 3_000)
    told = []
    made = build.convert(
        published / "e5_Flat.index", tmp_path / "made", kind, progress=lambda done, of: told.append(done)
    )
    assert made.ntotal == COUNT and told == [*range(3_000, COUNT, 3_000), COUNT]
    whole = make_type(WIDTH, kind, COUNT)
    every = np.concatenate([*blocks(MADE, COUNT)])
    whole.train(every)  # of no more than these, which the conversion learns from
    whole.add(every)
    faiss.write_index(whole, str(tmp_path / "whole"))
    assert (tmp_path / "made").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("make", "share"),
    [
        ('write_rescored(work / "flat", work, "IVF,SQ8", "float16", note)', 1 / 2),
        # Codes of 61 MB, which need no training.
        ('build.convert(work / "flat", work / "made", "SQfp16", progress=note)', 1 / 5),
    ],
    ids=["lists", "codes"],
)
def test_memory_stays_below_the_vectors(tmp_path, published, make, share):
    """In a process of its own, whose peak is read: the vectors of all blocks never meet in memory."""
    program = """
import resource, sys
import numpy as np
from retriever_service.dense import build, inverted
from retriever_service.dense.build import flat_header, make_type, write_rescored
from pathlib import Path
work = Path(sys.argv[1])
(work / "dense").mkdir()
count, width = 120_000, 256
block = np.random.default_rng(0).standard_normal((4_000, width)).astype(np.float32)
with (work / "flat").open("wb") as file:
    file.write(flat_header(width, count))
    for _ in range(count // 4_000):
        file.write(block.tobytes())
inverted.write_inverted.__kwdefaults__["block_rows"] = build._BLOCK_ROWS = 4_000
make = build.make_type
build.make_type = lambda d, kind, n: make(d, kind, 4_000)
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
before = anonymous()
peak = [0.0]
def note(done, of):
    peak[0] = max(peak[0], anonymous())
MAKE
print(peak[0] - before, count * width * 4 / 2**20)
"""
    done = subprocess.run(
        [sys.executable, "-c", program.replace("MAKE", make), str(tmp_path)],
        cwd=ROOT, timeout=180, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, vectors = map(float, done.stdout.split())
    assert grown < vectors * share


def test_what_does_not_go_is_one_line(tmp_path, published):
    with pytest.raises(UserError, match="rescore_dtype 'int3'"):
        convert(published, tmp_path / "c", rescore_dtype="int3")
    with pytest.raises(UserError, match=r"type 'IVF,PQ7': "):
        convert(published, tmp_path / "c", "IVF,PQ7")
    convert(published, tmp_path / "c", sample=10)
    shutil.copy(tmp_path / "c/dense" / EXACT, tmp_path / EXACT)
    with (tmp_path / EXACT).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(IndexInvalid, match=r"exact.vectors: 5000 bytes are not 20000 vectors of 64 numbers"):
        ExactVectors(tmp_path / EXACT, "float16", WIDTH, COUNT)
    (tmp_path / EXACT).replace(tmp_path / "c/dense" / EXACT)
    with pytest.raises(
        IndexInvalid, match=r"exact.vectors: 5000 bytes instead of 2560000, so it was cut off"
    ):
        Index(tmp_path / "c")
