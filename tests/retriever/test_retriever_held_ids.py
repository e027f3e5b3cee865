"""Adding a corpus of which the index has a part already."""

import json
import sys
import tracemalloc
from collections import deque

import pytest

from retriever_service.__main__ import main
from retriever_service.index_folder.corpus import read_corpus
from retriever_service.index_folder.description import read_info
from retriever_service.index_folder.held_ids import HeldIds
from retriever_service.index_folder.repeated import repeated_ids
from retriever_service.index_folder.segments import SegmentedDocuments
from retriever_service.indexing.build import build_index
from retriever_service.indexing.changes import add_to_index, delete_from_index
from retriever_service.search.index import Index
from services.common.errors import UserError


def corpus(path, *rows):
    path.write_text("".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in rows))
    return path


@pytest.fixture
def index(tmp_path):
    """Three passages, of which one was added: `first` and `second` by the build, `third` in a segment."""
    rows = (("first", "river one"), ("second", "river two"))
    build_index(corpus(tmp_path / "a", *rows), tmp_path / "i", postings="packed")
    add_to_index(tmp_path / "i", corpus(tmp_path / "b", ("third", "river three")))
    return tmp_path / "i"


def held(index):
    opened = Index(index)
    found = {}
    for document, _ in opened.search(["river"], 20)[0]:
        row = json.loads(document)
        found[row["id"]] = row["contents"]
    opened.close()
    return found


def test_passages_that_the_index_has_are_left_out_and_counted_as_doubled_ones_are(index, tmp_path):
    more = corpus(
        tmp_path / "more",
        ("new", "river four"), ("second", "river again"), ("new", "river doubled"), ("third", "river again"),
        ("second", "river once more"), ("newer", "river five"),
    )  # fmt: skip
    info = add_to_index(index, more, skip_bad=True)
    assert (info.passages, info.skipped, len(info.segments)) == (5, 4, 2)
    assert info.skipped_reasons == [
        f"{more}, line 2: id 'second' again; that of the index is kept",
        f"{more}, line 3: id 'new' again; that on line 1 is kept",
        f"{more}, line 4: id 'third' again; that of the index is kept",
    ]
    assert held(index) == {
        "first": "river one", "second": "river two", "third": "river three", "new": "river four",
        "newer": "river five",
    }  # fmt: skip


def test_a_deleted_passage_is_added_anew(index, tmp_path):
    delete_from_index(index, ["second"])
    more = corpus(tmp_path / "more", ("first", "river again"), ("second", "river anew"))
    assert add_to_index(index, more, skip_bad=True).skipped == 1
    assert held(index) == {"first": "river one", "second": "river anew", "third": "river three"}


def test_an_addition_of_nothing_new_leaves_the_index_as_it_was(index, tmp_path, monkeypatch, capsys):
    before = (index / "meta.json").read_bytes()
    more = corpus(tmp_path / "more", ("third", "river again"), ("first", "river again"))
    words = ["retriever", "index", "add", str(index), "--corpus", str(more), "--skip-bad"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as done:
        main()
    said = capsys.readouterr()
    assert done.value.code == 0 and "i: 3 passages" in said.out
    assert f"{index}: has the id of every passage of {more} already; kept as it is" in said.err
    assert (index / "meta.json").read_bytes() == before
    assert not (tmp_path / "i.building").exists() and len(read_info(index).segments) == 1


def test_lines_left_out_of_an_addition_of_nothing_new_are_counted_and_named(
    index, tmp_path, monkeypatch, capsys
):
    before = (index / "meta.json").read_bytes()
    more = tmp_path / "more"
    more.write_text('{"id": "third", "contents": "river again"}\n[1]\n')
    words = ["retriever", "index", "add", str(index), "--corpus", str(more), "--skip-bad"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as done:
        main()
    said = capsys.readouterr()
    assert done.value.code == 0 and (index / "meta.json").read_bytes() == before
    kept, count, first, second = said.err.splitlines()[-4:]
    assert kept == f"{index}: has the id of every passage of {more} already; kept as it is"
    assert count.startswith("2 lines were left out, malformed or with the id of an earlier one")
    assert first == f"{more}, line 1: id 'third' again; that of the index is kept"
    assert second.startswith(f"{more}, line 2: ") and "expected" in second


def test_an_id_that_is_only_a_url_of_the_index_is_none_of_its_ids(tmp_path):
    row = {"id": "a", "contents": "river one", "url": "http://a"}
    (tmp_path / "a").write_text(json.dumps(row) + "\n")
    build_index(tmp_path / "a", tmp_path / "i", postings="packed")
    more = corpus(tmp_path / "more", ("http://a", "river two"), ("a", "river again"))
    info = add_to_index(tmp_path / "i", more, skip_bad=True)
    assert (info.passages, info.skipped) == (2, 1)
    assert held(tmp_path / "i") == {"a": "river one", "http://a": "river two"}


def traced(work):
    """(what the work returns, bytes that stay, bytes at the peak)"""
    tracemalloc.start()
    try:
        return work(), *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_what_the_index_has_takes_few_bytes_per_passage_and_one_look_each(tmp_path, monkeypatch):
    n = 20_000
    rows = [(f"d{i}", f"river {i}") for i in range(n)]
    build_index(corpus(tmp_path / "a", *rows), tmp_path / "i", postings="packed")
    more = corpus(tmp_path / "more", *rows, ("new", "river"))
    looks = []
    get = SegmentedDocuments.get
    monkeypatch.setattr(SegmentedDocuments, "get", lambda self, row: looks.append(row) or get(self, row))
    with HeldIds(tmp_path / "i", read_info(tmp_path / "i")) as ids:
        *_, reading = traced(lambda: deque(read_corpus(more), maxlen=0))
        found, stays, peak = traced(lambda: repeated_ids(more, lambda passages, position: None, ids))
        assert not looks and found.lines == {} and len(found.suspects) == n
        kept = [passage.id for passage in read_corpus(more) if found.kept(passage) is None]
    assert kept == ["new"] and len(looks) == n
    assert stays < 10 * n and peak - reading < 64 * n, (stays, peak, reading)


def test_without_the_option_the_line_names_it(index, tmp_path):
    with pytest.raises(UserError, match=r"more, line 1: id 'third' is in the index .* --skip-bad does not"):
        add_to_index(index, corpus(tmp_path / "more", ("third", "river again")))
    (tmp_path / "none").write_text("[1]\n")
    with pytest.raises(UserError, match="none: holds no passage"):
        add_to_index(index, tmp_path / "none", skip_bad=True)
