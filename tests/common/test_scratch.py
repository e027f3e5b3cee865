"""Folders that a killed process has left half written are removed by the next one, those in use are not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from services.common import files, scratch
from services.common.files import folder_written_aside
from services.common.scratch import left_behind, scratch_folder
from trainer.commands.checks.leftovers import find_leftovers
from trainer.learner import checkpoint
from trainer.learner.checkpoint import written_aside

HOLDS = """
import sys
from pathlib import Path
{imports}
with {block} as folder:
    (folder / "weights").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.setattr(tempfile, "tempdir", None)


def holder(imports, block):
    """A process inside the block, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS.format(imports=imports, block=block)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


WRITERS = [
    (
        "from services.common.files import folder_written_aside",
        "folder_written_aside(Path({place!r}))",
        folder_written_aside,
    ),
    (
        "from trainer.learner.checkpoint import written_aside",
        "written_aside(Path({place!r}))",
        written_aside,
    ),
]


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_scratch_folder_of_a_killed_process_is_a_leftover_and_goes_with_the_next_one(temporary):
    imports, block = "from services.common.scratch import scratch_folder", 'scratch_folder("eval")'
    process, folder = holder(imports, block)
    assert os.path.dirname(folder) == str(temporary / "tmp") and left_behind() == []
    with scratch_folder("agent"):
        assert os.path.exists(f"{folder}/weights")  # in use
    kill(process)
    assert [str(left) for left in left_behind()] == [folder]
    assert folder in [leftover.what for leftover in find_leftovers([])]
    with scratch_folder("agent") as mine:
        assert os.listdir(temporary / "tmp") == [mine.name]
    assert os.listdir(temporary / "tmp") == []


def test_one_that_a_process_of_another_container_holds_is_none(temporary, monkeypatch):
    """Its id means another process here, or none."""
    monkeypatch.setattr(scratch, "_is_there", lambda process: False)
    process, folder = holder("from services.common.scratch import scratch_folder", 'scratch_folder("agent")')
    assert left_behind() == []
    kill(process)
    assert [str(left) for left in left_behind()] == [folder]


@pytest.mark.parametrize(
    ("module", "last", "write"),
    [(files, "readable_as_usual", folder_written_aside), (checkpoint, "_sha256", written_aside)],
    ids=["model", "checkpoint and export"],
)
def test_what_is_written_aside_is_held_until_it_has_its_name(temporary, monkeypatch, module, last, write):
    """The checksums of gigabytes take minutes, in which a process of another container may begin."""
    place = temporary / "models" / "b"
    looked = []

    def look(*given):
        (aside,) = place.parent.iterdir()
        looked.append(scratch._abandoned(aside, os.getpid()))
        return finish(*given)

    finish = getattr(module, last)
    monkeypatch.setattr(scratch, "_is_there", lambda process: False)
    monkeypatch.setattr(module, last, look)
    with write(place) as aside:
        (aside / "weights").write_text("y")
    assert looked == [False] and (place / "weights").read_text() == "y"


@pytest.mark.parametrize(
    ("imports", "block", "again"),
    WRITERS,
    ids=["model", "checkpoint and export"],
)
def test_what_a_killed_process_wrote_aside_goes_with_the_next_write(temporary, imports, block, again):
    place = temporary / "models" / "b"
    process, folder = holder(imports, block.format(place=str(place)))
    beside = place.parent / ".other.4194305.tmp"  # of another name, though its process is gone
    beside.mkdir()
    with again(place) as aside:
        assert os.path.exists(f"{folder}/weights")  # in use
        (aside / "weights").write_text("y")
    kill(process)
    shutil.rmtree(place)
    with again(place) as aside:
        assert not os.path.exists(folder)
        (aside / "weights").write_text("z")
    assert (place / "weights").read_text() == "z" and beside.exists()


BETWEEN = """
import os, signal
from pathlib import Path
{imports}
from services.common import files
rename = os.rename
def renamed(source, target):
    rename(source, target)
    if {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
files.os.rename = renamed
with {block} as folder:
    (folder / "weights").write_text("x")
"""


@pytest.mark.parametrize(("imports", "block", "again"), WRITERS, ids=["model", "export"])
@pytest.mark.parametrize("moment", ["True", "str(target) == {place!r}"], ids=["between", "after"])
def test_what_a_process_had_replaced_goes_too_where_it_was_killed_at_the_renames(
    temporary, imports, block, again, moment
):
    """Gigabytes of the earlier weights under a hidden name; while nothing has their name they stay."""
    place = temporary / "models" / "b"
    with again(place) as aside:
        (aside / "weights").write_text("earlier")
    script = BETWEEN.format(
        imports=imports, block=block.format(place=str(place)), moment=moment.format(place=str(place))
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    (old,) = [one for one in place.parent.iterdir() if one.name.endswith("old")]
    assert (old / "weights").read_text() == "earlier" and place.exists() == (moment != "True")
    with pytest.raises(RuntimeError), again(place):
        raise RuntimeError
    assert (old / "weights").read_text() == "earlier"
    with again(place) as aside:
        (aside / "weights").write_text("z")
    assert [one.name for one in place.parent.iterdir()] == ["b"]
    assert (place / "weights").read_text() == "z"
