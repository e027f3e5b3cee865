"""Checkpoints on disk: only whole ones count."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import fill
from safetensors import SafetensorError

from services.common.errors import UserError
from trainer.learner import checkpoint, export, tensor_files
from trainer.learner.checkpoint import (
    CheckpointNotWritten,
    fault,
    find,
    latest,
    prune,
    require_whole,
    written_aside,
)
from trainer.loop.keeping.replaced_state import replace_state


def write(run, step, text="weights"):
    path = run / "checkpoints" / f"step_{step:06d}"
    with written_aside(path) as folder:
        fill(folder, {"step": step}, text)
    return path


def test_the_newest_checkpoint_is_chosen(tmp_path):
    assert latest(tmp_path) is None
    write(tmp_path, 9)
    newest = write(tmp_path, 10)
    assert latest(tmp_path) == newest
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000009", "step_000010"]


def test_another_state_writes_no_tensor_again_and_hides_no_fault(tmp_path):
    path = write(tmp_path, 9)
    tensors = (path / "weights" / "model.safetensors").stat().st_ino
    replace_state(path, {"step": 9, "scores": 1})
    assert fault(path) is None and json.loads((path / "state.json").read_text())["scores"] == 1
    assert (path / "weights" / "model.safetensors").stat().st_ino == tensors
    assert [p.name for p in path.parent.iterdir()] == ["step_000009"]
    _flip(path)
    replace_state(path, {"step": 9, "scores": 2})
    assert fault(path) == "weights/model.safetensors does not match its checksum"


def test_another_state_of_a_linked_checkpoint_goes_where_the_link_leads(tmp_path):
    """A run whose checkpoints were moved to a larger disk."""
    path = write(tmp_path, 9)
    far = tmp_path / "far" / path.name
    far.parent.mkdir()
    path.rename(far)
    path.symlink_to(far)
    replace_state(path, {"step": 9, "scores": 1})
    assert path.is_symlink() and [p.name for p in far.parent.iterdir()] == [path.name]
    assert fault(far) is None and json.loads((far / "state.json").read_text())["scores"] == 1
    assert latest(tmp_path) == path


def _truncate(p):
    (p / "weights" / "model.safetensors").write_text("weights")


def _flip(p):
    data = bytearray((p / "weights" / "model.safetensors").read_bytes())
    data[50] ^= 1
    (p / "weights" / "model.safetensors").write_bytes(data)


def _forget(p, name):
    manifest = json.loads((p / "manifest.json").read_text())
    del manifest["files"][name]
    (p / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "tear",
    [
        _truncate,
        _flip,
        lambda p: (p / "state.json").unlink(),
        lambda p: (p / "manifest.json").unlink(),
        lambda p: (p / "manifest.json").write_text('{"files": {"sta'),
        lambda p: (p / "manifest.json").write_text('{"files": {}}'),
        lambda p: _forget(p, "state.json"),
        lambda p: _forget(p, "weights/model.safetensors"),
    ],
    ids=[
        "truncated",
        "bit flipped",
        "file gone",
        "no manifest",
        "manifest torn",
        "empty manifest",
        "manifest without a file",
        "manifest without the weights",
    ],
)
def test_a_torn_checkpoint_is_never_chosen_and_is_refused_by_name(tmp_path, tear):
    older, newer = write(tmp_path, 5), write(tmp_path, 10)
    tear(newer)
    assert latest(tmp_path) == older
    with pytest.raises(UserError, match="step_000010 is torn or changed") as e:
        require_whole(newer)
    assert e.value.exit_code == 2 and "\n" not in str(e.value)
    said = []
    assert find(tmp_path, say=said.append) == find(older, say=said.append) == older
    (line,) = said  # the second was named
    assert line.startswith(f"{newer} is torn or changed (")
    assert line.endswith("): step_000005 is taken, an earlier one")


@pytest.mark.parametrize(
    ("about", "missing"),
    [
        ({"adam_steps": 4, "snapshot": False}, "optimizer/"),
        ({"adam_steps": 0, "snapshot": True}, "snapshot/"),
    ],
)
def test_a_checkpoint_holds_what_its_learner_says_that_it_holds(tmp_path, about, missing):
    path = tmp_path / "checkpoints" / "step_000005"
    with written_aside(path) as folder:
        fill(folder, {})
        (folder / "learner.json").write_text(json.dumps(about))
    assert fault(path) == f"manifest.json lists no {missing}" and latest(tmp_path) is None


def test_a_shard_that_the_manifest_does_not_list_is_missed(tmp_path):
    path = tmp_path / "checkpoints" / "step_000005"
    with written_aside(path) as folder:
        fill(folder, {})
        writer = tensor_files.TensorWriter(folder / "weights", shard_bytes=8)
        for name in "ab":
            writer.add(name, torch.zeros(4))
        writer.finish()
    assert fault(path) is None
    _forget(path, "weights/model-00002.safetensors")
    assert fault(path) == "manifest.json lists no weights/model-00002.safetensors"


@pytest.mark.parametrize(
    "tear",
    [
        lambda p: (p / "learner.json").write_bytes(bytes((p / "learner.json").stat().st_size)),
        lambda p: (p / "weights" / tensor_files.INDEX).write_text("{}"),
        lambda p: (p / "manifest.json").write_text("[" * 100_000),
    ],
    ids=["zeros of the right size", "index without shards", "nested too deeply"],
)
def test_files_that_sizes_alone_take_for_whole_end_neither_a_search_nor_a_save(tmp_path, tear):
    """A power cut leaves zeros where a file's size is known and its content is not written."""
    older, newer = write(tmp_path, 5), write(tmp_path, 10)
    tear(newer)
    assert "can't be read" in fault(newer, checksums=False)
    assert latest(tmp_path, checksums=False) == latest(tmp_path) == older
    assert prune(tmp_path, keep=1) == [newer]


def test_a_checkpoint_of_another_user_is_passed_over(tmp_path, monkeypatch):
    older, newer = write(tmp_path, 5), write(tmp_path, 10)
    is_file = Path.is_file

    def may_not_be_searched(path):
        if path.parent == newer:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", may_not_be_searched)
    assert "Permission denied" in fault(newer, checksums=False)
    assert latest(tmp_path) == older


def test_a_checkpoint_that_was_moved_away_and_linked_stays_whole_when_its_link_is_pruned(tmp_path):
    linked, newest = write(tmp_path, 5), write(tmp_path, 10)
    archived = linked.rename(tmp_path / "archived")
    linked.symlink_to(archived)
    (tmp_path / "checkpoints" / "step_000020").write_text("no folder")
    write(tmp_path, 5)  # written anew, in place of the link
    assert fault(archived) is None and fault(linked) is None and not linked.is_symlink()
    checkpoint.drop_after(tmp_path, 5)
    linked.rename(newest)
    linked.symlink_to(archived)
    assert prune(tmp_path, keep=1) == [linked]
    assert fault(archived) is None and not linked.exists()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000010"]


def test_a_link_that_leads_nowhere_gives_way_to_the_checkpoint_of_its_step(tmp_path):
    """The disk that checkpoints were moved to is not mounted."""
    linked = write(tmp_path, 5)
    shutil.rmtree(linked)
    linked.symlink_to(tmp_path / "nowhere" / linked.name)
    assert latest(tmp_path) is None
    assert write(tmp_path, 5) == linked == latest(tmp_path)
    assert [p.name for p in linked.parent.iterdir()] == [linked.name] and not linked.is_symlink()


@pytest.mark.parametrize("fails", ["folder", "weights", "manifest", "sync"])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch, fails):
    path, full = write(tmp_path, 5), OSError(errno.ENOSPC, "No space left on device")

    def no_room(*args, **options):
        raise (
            full
            if fails != "weights"
            else SafetensorError("I/O error: No space left on device (os error 28)")
        )

    names = {
        "folder": "os.mkdir",
        "weights": "safetensors.torch.save_file",
        "manifest": "trainer.learner.checkpoint.write_json",
    }
    monkeypatch.setattr(names.get(fails, "os.fsync"), no_room)
    with (
        pytest.raises(CheckpointNotWritten, match=r"step_000010 cannot be written: .*No space left") as e,
        written_aside(path.with_name("step_000010")) as folder,
    ):
        writer = tensor_files.TensorWriter(folder / "weights")
        writer.add("a", torch.zeros(3))
        writer.finish()
    assert e.value.exit_code == 3 and "\n" not in str(e.value)
    assert latest(tmp_path) == path and [p.name for p in path.parent.iterdir()] == ["step_000005"]


def test_an_interrupted_write_leaves_what_was_there(tmp_path):
    path = write(tmp_path, 5)
    with pytest.raises(RuntimeError, match="disk"), written_aside(path) as folder:
        (folder / "state.json").write_text("half")
        raise RuntimeError("disk")
    assert fault(path) is None and json.loads((path / "state.json").read_text()) == {"step": 5}
    assert [p.name for p in path.parent.iterdir()] == ["step_000005"]


def test_writing_a_step_again_replaces_it_and_the_old_one_serves_if_the_rename_never_came(tmp_path):
    path = write(tmp_path, 5, "first")
    write(tmp_path, 5, "other")
    assert (path / "weights" / "model.safetensors").read_text().startswith("other")
    path.rename(path.with_name("step_000005.old"))  # killed between the two renames
    assert latest(tmp_path) == path.with_name("step_000005.old")


def test_prune_keeps_the_newest_whole_ones(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    _truncate(tmp_path / "checkpoints" / "step_000004")
    (tmp_path / "checkpoints" / ".tmp-step_000005-99").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    prune(tmp_path, 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "notes",
        "step_000002",
        "step_000003",
    ]


def test_an_export_does_not_overwrite_what_is_no_export(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    (model / "config.json").write_text('{"torch_dtype": "bfloat16", "hidden_size": 4}')
    (model / "model.safetensors").write_text("old weights")
    out.mkdir()
    (out / "thesis.txt").write_text("keep me")
    with (
        pytest.raises(UserError, match="no earlier export"),
        export.exported(out, model, dtype="float32", about={}),
    ):
        pass
    assert (out / "thesis.txt").read_text() == "keep me"


def test_shards_come_back_whole(tmp_path):
    import torch

    tensors = {f"layer.{i}": torch.randn(10, i + 1) for i in range(7)}
    writer = tensor_files.TensorWriter(tmp_path, shard_bytes=150)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    read = tensor_files.TensorReader(tmp_path)
    assert sorted(read.names) == sorted(tensors) and all(torch.equal(read(n), t) for n, t in tensors.items())
    with pytest.raises(UserError, match=r"no tensor layer\.9"):
        read("layer.9")


def test_a_disk_that_is_full_is_one_reason_at_the_first_file(tmp_path, monkeypatch):
    path = tmp_path / "step_000009"
    with written_aside(path) as aside:
        for name in ("state.json", "learner.json", "model/config.json", "weights/a", "rng/a"):
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text("{}")
    tried = []

    def full(source, target):
        tried.append(source)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.loop.keeping.replaced_state.link_or_copy", full)
    with pytest.raises(
        CheckpointNotWritten, match=r"cannot be written: \[Errno 28\] No space left on device$"
    ):
        replace_state(path, {"step": 9})
    assert len(tried) == 1 and fault(path) is None
