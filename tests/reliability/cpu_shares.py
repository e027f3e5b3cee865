"""Processes that get a share of a core each, by control groups: as if each had a machine of its own, however
few cores this one has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

PERIOD_US = 100_000
ROOT = Path("/sys/fs/cgroup")


def _limit(folder: Path, share: float) -> None:
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{int(share * PERIOD_US)} {PERIOD_US}")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD_US)))


class CpuShares:
    """One group a process and its children."""

    def __init__(self, parent: Path, share: float) -> None:
        self.parent, self.share = parent, share

    def give(self, pid: int) -> None:
        folder = self.parent / str(pid)
        if folder.exists():
            return
        folder.mkdir()
        _limit(folder, self.share)
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            (folder / "cgroup.procs").write_text(str(process.pid))

    def remove(self) -> None:
        for folder in (*self.parent.iterdir(), self.parent):
            if folder.is_dir():
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        (self.parent.parent / "cgroup.procs").write_text(pid)
                folder.rmdir()


@contextlib.contextmanager
def cpu_shares(share: float) -> Iterator[CpuShares | None]:
    """None where this user may not make control groups."""
    parent = (ROOT / "cpu" if (ROOT / "cpu").is_dir() else ROOT) / f"unspiral-test-{os.getpid()}"
    try:
        parent.mkdir()
        if (parent / "cgroup.subtree_control").exists():
            (parent / "cgroup.subtree_control").write_text("+cpu")
        (parent / "try").mkdir()
        _limit(parent / "try", share)
        (parent / "try").rmdir()
    except OSError:
        with contextlib.suppress(OSError):
            parent.rmdir()
        yield None
        return
    shares = CpuShares(parent, share)
    try:
        yield shares
    finally:
        shares.remove()
