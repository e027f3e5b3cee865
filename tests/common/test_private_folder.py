"""Temporary files under names that others could guess: not trusted where another user could have put them."""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from retriever_service.search.published import open_corpus_documents
from services.common.private_folder import is_own_file, private_folder

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The shared temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_it_is_this_users_alone(shared):
    folder = private_folder()
    assert folder.parent == shared and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert private_folder() == folder and folder.stat().st_mode & 0o777 == 0o700


def test_a_link_or_a_file_in_its_place_is_refused(shared, tmp_path):
    (shared / f"unspiral-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match=f"unspiral-{os.getuid()}: is not a folder of this user's"):
        private_folder()


@AS_ROOT
def test_a_folder_that_another_user_made_is_refused(shared):
    planted = shared / f"unspiral-{os.getuid()}"
    planted.mkdir()
    os.chown(planted, 12345, 12345)
    with pytest.raises(PermissionError):
        private_folder()


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpora" / "c.jsonl"
    file.parent.mkdir()
    rows = [{"id": str(i), "contents": f"passage {i}"} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def offsets_of(corpus):
    stat = corpus.stat()
    return f"{corpus.name}.{stat.st_size}.{stat.st_mtime_ns}.offsets"


def test_places_of_lines_are_not_taken_from_the_shared_temporary_folder(corpus, shared):
    planted = shared / offsets_of(corpus)
    planted.write_bytes(b"\0" * 8 + (10).to_bytes(8, "little"))
    documents = open_corpus_documents(corpus)
    assert (documents.count, documents.get(2)) == (3, ("2", "passage 2"))


@AS_ROOT
def test_places_of_lines_that_another_user_wrote_beside_the_corpus_are_not_taken(corpus, shared):
    planted = corpus.with_name(offsets_of(corpus))
    planted.write_bytes(b"\0" * 8 + (10).to_bytes(8, "little"))
    os.chown(planted, 12345, 12345)
    assert open_corpus_documents(corpus).count == 3


def test_places_of_lines_lie_in_the_private_folder_where_the_corpus_cannot_hold_them(
    corpus, shared, monkeypatch
):
    replace = os.replace

    def refused(source, target):
        if os.path.dirname(target) == str(corpus.parent):
            raise PermissionError(13, "read-only")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    assert open_corpus_documents(corpus).count == 3
    (kept,) = private_folder().iterdir()
    assert kept.name.endswith(offsets_of(corpus)) and is_own_file(kept)
    other = corpus.parent.parent / "others" / "c.jsonl"
    other.parent.mkdir()
    other.write_bytes(corpus.read_bytes())
    os.utime(other, ns=(corpus.stat().st_atime_ns, corpus.stat().st_mtime_ns))
    monkeypatch.setattr(
        "retriever_service.search.published.line_offsets", lambda path: pytest.fail("read again")
    )
    assert open_corpus_documents(corpus).count == 3
    with pytest.raises(BaseException, match="read again"):
        open_corpus_documents(other)


def test_what_others_can_write_or_a_link_is_no_own_file(tmp_path):
    file = tmp_path / "f"
    assert not is_own_file(file)
    file.touch(mode=0o644)
    assert is_own_file(file)
    (tmp_path / "link").symlink_to(file)
    assert not is_own_file(tmp_path / "link")
    file.chmod(0o666)
    assert not is_own_file(file)
