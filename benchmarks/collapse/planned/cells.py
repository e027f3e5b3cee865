"""The cells of the study as run folders: where they lie, and what their files say of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.collapse.planned.arms import ARMS, STEPS, configuration, kept_series
from benchmarks.grids.cell_folder import CellFolder
from benchmarks.grids.leaves import leaves
from services.common.errors import UserError
from services.common.files import lock
from trainer.config.schema import dump_config, parse_config

MOST_FAILURES = 3
"""Times that a cell may end with exit status 1; after them it counts as dead (PLAN.md)."""
SIGNAL_STATUS = range(129, 160)


@dataclass(frozen=True)
class Cell(CellFolder):
    """One arm (its row) with one seed."""

    steps: int = STEPS

    @property
    def source(self) -> Cell | None:
        """The cell whose recorded series this one follows, and which has to end before. None where that
        series was kept from a collected cell."""
        followed = ARMS[self.row].follows
        if not followed or kept_series(self.folder, followed, self.seed).is_file():
            return None
        return Cell(followed, self.seed, self.folder, self.steps)

    def config_file(self) -> Path:
        """Write the configuration as a file. Returns its path.

        Raises UserError where the run folder holds a run with other settings."""
        wanted = dump_config(parse_config(configuration(self.row, self.seed, self.folder, self.steps)))
        begun = self.run / "config.yaml"
        if begun.is_file() and (changed := sorted(_differences(begun.read_text("utf-8"), wanted))):
            raise UserError(
                f"--folder {self.folder}: {self.run} holds a run with another {', '.join(changed)}; "
                f"choose another folder, or remove {self.run}"
            )
        file = self.folder / "configs" / f"{self.name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(wanted, encoding="utf-8")
        return file

    @property
    def died(self) -> bool:
        return self.failures() >= MOST_FAILURES

    @property
    def ended(self) -> bool:
        summary = self.summary()
        return summary.get("exit") == 0 and summary.get("steps") == self.steps and not self.held()

    def held(self) -> bool:
        """Whether a process has the run folder in use."""
        if not (self.run / ".lock").exists():
            return False
        try:
            lock(self.run / ".lock").close()
        except BlockingIOError:
            return True
        return False

    def state(self) -> str:
        """`ended`, `dead`, `running N`, `cut at N`, `failed at N` or `-`."""
        if self.held():
            return f"running {self.step()}"
        if self.ended:
            return "ended"
        if self.died:
            return f"dead at {self.step()}"
        if not (self.run / "events.jsonl").exists():
            return "-"
        status = self.summary().get("exit", 0)
        word = "failed" if status and status not in SIGNAL_STATUS else "cut"
        return f"{word} at {self.step()}"


def cells(folder: Path, arms: list[str], seeds: list[int], steps: int = STEPS) -> list[Cell]:
    """In the order of the plan: all seeds of an arm before the next arm."""
    return [Cell(arm, seed, folder, steps) for arm in arms for seed in seeds]


def _differences(a: str, b: str) -> set[str]:
    """Dotted keys in which two configurations (YAML) differ, but for the place of the grid's folder."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    first, second = dict(leaves(yaml.load(a))), dict(leaves(yaml.load(b)))
    return {k for k in first.keys() | second.keys() if first.get(k) != second.get(k)} - {
        "run.dir",
        "learner.match_kl",
    }
