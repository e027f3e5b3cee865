"""What a refused build leaves: nothing where a mended corpus could not go on from it, otherwise a folder that
the line names."""

import json
from pathlib import Path

import pytest

from retriever_service.indexing import build, scan
from retriever_service.indexing.build import build_index
from retriever_service.indexing.changes import add_to_index, delete_from_index
from retriever_service.indexing.merge import merge_index
from retriever_service.indexing.sinks import PostingsSink
from services.common.errors import EnvironmentLacks, UserError


def corpus(path, count=6, *more):
    rows = [json.dumps({"id": str(n), "contents": f"passage {n}"}) for n in range(count)]
    path.write_text("\n".join([*rows, *more]) + "\n")
    return path


@pytest.fixture
def few(monkeypatch):
    """Chunks of two passages, so that a build has something on disk when it fails."""
    monkeypatch.setattr(PostingsSink, "chunk_passages", 2)


@pytest.mark.parametrize("count", [0, 6])
@pytest.mark.parametrize("bad", ["[1]", '{"id": "9"}', '{"id": "0", "contents": "again"}', "{"])
def test_a_malformed_corpus_leaves_no_folder(tmp_path, few, bad, count):
    if count == 0 and "again" in bad:
        bad = "\n".join([bad, bad])
    with pytest.raises(UserError) as e:
        build_index(corpus(tmp_path / "c.jsonl", count, bad), tmp_path / "i")
    assert ".building" not in str(e.value)
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_file_that_is_no_corpus_and_a_disk_that_is_too_small_leave_no_folder(tmp_path, monkeypatch):
    (tmp_path / "b").write_bytes(b"\x00\x01\x02\xff" * 50)
    with pytest.raises(UserError, match="binary"):
        build_index(tmp_path / "b", tmp_path / "i")

    def full(*given):
        raise EnvironmentLacks("disk: too small")

    monkeypatch.setattr(build, "require_disk", full)
    with pytest.raises(EnvironmentLacks, match=r"^disk: too small$"):
        build_index(corpus(tmp_path / "c.jsonl"), tmp_path / "i")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "c.jsonl"]


def failing(monkeypatch, raises):
    """The reading of a corpus fails after four passages."""
    read = scan.read_corpus

    def cut(*given, **options):
        for number, passage in enumerate(read(*given, **options)):
            if number == 4:
                raises()
            yield passage

    monkeypatch.setattr(scan, "read_corpus", cut)


def unreadable():
    try:
        raise OSError(5, "Input/output error")
    except OSError as error:
        raise UserError(f"c.jsonl: cannot be read: {error}") from None


def lacking():
    raise EnvironmentLacks("the encoder is out of memory")


@pytest.mark.parametrize("raises", [unreadable, lacking])
def test_where_the_same_command_goes_on_the_line_names_the_folder(tmp_path, few, monkeypatch, raises):
    file = corpus(tmp_path / "c.jsonl")
    with monkeypatch.context() as patch:
        failing(patch, raises)
        with pytest.raises((UserError, EnvironmentLacks)) as e:
            build_index(file, tmp_path / "i")
    kept = f"; {tmp_path}/i.building keeps what was built, and the same command goes on there"
    assert str(e.value).endswith(kept)
    said = []
    build_index(file, tmp_path / "i", progress=lambda stage, done, text: said.append(text))
    assert "going on after 4 passages" in said
    assert not (tmp_path / "i.building").exists()


def test_what_another_build_left_stays_where_a_malformed_corpus_is_refused_at_once(
    tmp_path, few, monkeypatch
):
    with monkeypatch.context() as patch:
        failing(patch, lacking)
        with pytest.raises(EnvironmentLacks):
            build_index(corpus(tmp_path / "c.jsonl"), tmp_path / "i")
    (tmp_path / "b").write_bytes(b"\x00\x01\x02\xff" * 50)
    with pytest.raises(UserError, match="binary"):
        build_index(tmp_path / "b", tmp_path / "i")
    assert (tmp_path / "i.building" / "progress.json").exists()


def test_a_refused_addition_leaves_no_folder_and_the_index_as_it_was(tmp_path):
    build_index(corpus(tmp_path / "c.jsonl"), tmp_path / "i", postings="packed")
    before = (tmp_path / "i" / "meta.json").read_bytes()
    with pytest.raises(UserError, match=r"more\.jsonl, line 2"):
        more = tmp_path / "more.jsonl"
        more.write_text('{"id": "x", "contents": "new"}\n{"id": "y"}\n')
        add_to_index(tmp_path / "i", more)
    assert (tmp_path / "i" / "meta.json").read_bytes() == before
    assert not (tmp_path / "i.building").exists()
    more.write_text('{"id": "x", "contents": "new"}\n')
    assert add_to_index(tmp_path / "i", more).passages == 7


def test_an_index_is_called_as_it_was_given_and_found_behind_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "c.jsonl")
    build_index("c.jsonl", "index", postings="packed")
    Path("link").symlink_to("index")
    with pytest.raises(UserError, match=r"^index index: has no passage with the id 'nope'"):
        delete_from_index("index", ["nope"])
    for changes in (merge_index, lambda index: delete_from_index(index, ["1"])):
        with pytest.raises(UserError, match=r"^index none: no such folder; .* --out none` makes one$"):
            changes("none")
    delete_from_index("link", ["1"])
    merge_index("link")
    monkeypatch.chdir(tmp_path / "index")
    delete_from_index(".", ["2"])
    assert merge_index(".").passages == 4
    assert sorted(place.name for place in tmp_path.iterdir()) == ["c.jsonl", "index", "link"]
