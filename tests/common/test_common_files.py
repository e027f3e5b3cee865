"""Files that are there whole or not at all, with the mode that any other file has."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest
import torch
from places import ROOT
from safetensors.torch import save_file

from services.common import files
from trainer.learner.checkpoint import written_aside
from trainer.learner.tensor_files import TensorWriter


def modes(folder):
    return {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(params=[0o022, 0o027, 0o077])
def usual(request):
    before = os.umask(request.param)
    yield oct(0o666 & ~request.param)
    os.umask(before)


def test_a_file_that_a_library_made_for_its_owner_alone_gets_the_umasks_mode(tmp_path, usual):
    with files.written_aside(tmp_path / "weights.safetensors") as aside:
        save_file({"a": torch.zeros(2)}, aside)
    with files.written_aside(tmp_path / "temporary") as aside:
        handle, made = tempfile.mkstemp(dir=tmp_path)
        os.close(handle)
        os.replace(made, aside)
    files.write_atomically(tmp_path / "text", "x")
    assert modes(tmp_path) == dict.fromkeys(("weights.safetensors", "temporary", "text"), usual)


def test_all_files_of_a_checkpoint_and_of_a_model_folder_have_the_umasks_mode(tmp_path, usual):
    with written_aside(tmp_path / "step_000001") as folder:
        writer = TensorWriter(folder / "weights", shard_bytes=8)
        for name in "abc":
            writer.add(name, torch.zeros(4))
        writer.finish()
        (folder / "state.json").write_text("{}")
    with files.folder_written_aside(tmp_path / "model") as folder:
        save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
    found = modes(tmp_path)
    assert len(found) == 8 and set(found.values()) == {usual}, found
    (tmp_path / "plain").mkdir()
    folders = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_dir()}
    assert folders == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


def test_a_failed_write_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), files.written_aside(path) as aside:
        aside.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["summary.json"]


def test_an_error_names_the_file_and_not_the_one_aside(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_atomically(tmp_path / "full", "x")
    assert caught.value.filename == "/dev/full"
    with pytest.raises(OSError, match="No space left") as caught:
        files.append_json(tmp_path / "full", {})
    assert caught.value.filename == str(tmp_path / "full")
    with pytest.raises(OSError, match="No such file") as caught:
        files.write_atomically(tmp_path / "absent" / "x", "x")
    assert caught.value.filename == str(tmp_path / "absent" / "x")


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_a_link_to_a_folder_stays_one_and_its_folder_is_replaced(tmp_path):
    place = tmp_path / "far" / "model"
    (tmp_path / "link").symlink_to(place)
    for text in ("first", "second"):  # a link to nothing, then to a folder
        with files.folder_written_aside(tmp_path / "link") as folder:
            (folder / text).write_text(text)
        assert (tmp_path / "link").is_symlink() and os.listdir(place) == [text]
    assert os.listdir(place.parent) == ["model"] and sorted(os.listdir(tmp_path)) == ["far", "link"]


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    place = tmp_path / "deep" / "model"
    for text in ("first", "second"):
        with files.folder_written_aside(place) as folder:
            (folder / text).write_text(text)
    assert os.listdir(place) == ["second"] and os.listdir(place.parent) == ["model"]
    with pytest.raises(RuntimeError), files.folder_written_aside(place) as folder:
        raise RuntimeError
    with files.folder_written_aside(place, keep=True) as folder:
        (folder / "third").write_text("")
    assert os.listdir(place) == ["second"] and os.listdir(place.parent) == ["model"]


@pytest.mark.parametrize(("keep", "stands"), [(True, "theirs"), (False, "ours")])
def test_a_folder_that_comes_in_between_is_no_error(tmp_path, monkeypatch, keep, stands):
    """Another process puts its own there after this one has looked."""
    place = tmp_path / "made"
    lexists = os.path.lexists

    def looked(path):
        there = lexists(path)
        if path == place and not there:
            place.mkdir()
            (place / "whose").write_text("theirs")
        return there

    with files.folder_written_aside(place, keep=keep) as folder:
        (folder / "whose").write_text("ours")
        monkeypatch.setattr(os.path, "lexists", looked)
    assert (place / "whose").read_text() == stands
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_processes_that_replace_one_folder_at_the_same_time_all_do(tmp_path):
    """Each finds at some time that another's has just come, or gone, and goes on. Every folder is whole."""
    replaces = (
        "import sys; from pathlib import Path; from services.common.files import folder_written_aside\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for turn in range(150):\n"
        "    with folder_written_aside(Path(sys.argv[1])) as folder:\n"
        "        for name in 'ab': (folder / name).write_text(sys.argv[2])\n"
    )
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", replaces, str(tmp_path / "made"), str(at)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for at in range(4)
    ]
    assert [process.stdout.readline() for process in begun] == ["ready\n"] * 4
    for process in begun:
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=120)[1] for process in begun]
    assert errors == [""] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"a", "b"}


@pytest.mark.parametrize("stands", [True, False])
def test_a_folder_that_others_take_away_and_put_back_is_replaced_all_the_same(tmp_path, monkeypatch, stands):
    """Another process moves it away after this one has looked, and has its own there before this one's."""
    place, made, earlier = (tmp_path / name for name in ("place", "made", "earlier"))
    for folder in (made, *([place] if stands else [])):
        folder.mkdir()
        (folder / "whose").write_text("ours" if folder is made else "first")
    rename, turns = os.rename, []

    def meanwhile(source, target):
        turns.append(source)
        if source == place and len(turns) == 1:
            shutil.rmtree(place)
        if source == made and len(turns) <= 2:
            place.mkdir()
            (place / "whose").write_text("theirs")
        rename(source, target)

    monkeypatch.setattr(os, "rename", meanwhile)
    files.put_folder(made, place, earlier=earlier)
    assert (place / "whose").read_text() == "ours" and (earlier / "whose").read_text() == "theirs"
    assert not made.exists() and turns.count(made) == 2


def test_json_lines_survive_a_writer_that_was_killed_in_its_line(tmp_path):
    path = tmp_path / "m.jsonl"
    assert files.json_lines(path) == []
    files.append_json(path, {"step": 1})
    with open(path, "a") as f:
        f.write('{"step": 2, "x')
    files.append_json(path, {"step": 3, "text": "é"})
    assert files.json_lines(path) == [{"step": 1}, {"step": 3, "text": "é"}]
    files.keep_json_lines(path, lambda record: record["step"] > 1)
    assert path.read_text(encoding="utf-8") == json.dumps({"step": 3, "text": "é"}, ensure_ascii=False) + "\n"


def test_a_lock_has_one_holder_until_it_is_closed(tmp_path):
    with files.lock(tmp_path / "lock"), pytest.raises(BlockingIOError):
        files.lock(tmp_path / "lock")
    files.lock(tmp_path / "lock").close()


def test_nothing_else_renames_locks_or_makes_files_for_their_owner_alone():
    """`shared_memory` keeps weights from other users of the machine, on purpose; `scratch` locks folders, not
    files."""
    own = re.compile(r"os\.(replace|rename)\b|\.rename\(|shutil\.move|fcntl\.flock|mkstemp|mkdtemp")
    kept = {
        "services/common/files.py",
        "services/common/scratch.py",
        "services/weight_sync/shared_memory.py",
    }
    found = {
        str(path.relative_to(ROOT))
        for room in ("trainer", "services", "retriever_service")
        for path in (ROOT / room).rglob("*.py")
        if own.search(path.read_text(encoding="utf-8"))
    }
    assert found == kept


def test_who_holds_a_lock_is_told_by_process(tmp_path):
    place = tmp_path / "lock"
    code = (
        "import sys; from pathlib import Path; from services.common.files import lock; "
        "held = lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError):
            files.lock(place)
        assert files.holder_of(place) == f" (process {holder.pid})"
        holder.stdin.close()
    files.lock(place).close()
    assert files.holder_of(place) == "" == files.holder_of(tmp_path / "none")
