"""Another state of the driver in a checkpoint that is there already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.common.files import followed, link_or_copy, write_json
from trainer.learner.checkpoint import MANIFEST, STATE, written_aside


def replace_state(path: Path, state: dict[str, Any]) -> None:
    """Give a checkpoint another state of the driver. Its other files are linked where the file system can, so
    that no tensor is written again, and keep their checksums: one that was torn stays so. Raises
    CheckpointNotWritten."""
    known = json.loads((path / MANIFEST).read_text())["files"]
    del known[STATE]
    with written_aside(followed(path), known) as aside:
        for file in sorted(f for f in path.rglob("*") if f.is_file()):
            name = file.relative_to(path)
            if str(name) not in (MANIFEST, STATE):
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(file, aside / name)
        write_json(aside / STATE, state)
