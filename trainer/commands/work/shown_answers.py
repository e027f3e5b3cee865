"""Answers that `unspiral eval` keeps at a place of the user's choice, for the pages of the run as well."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from services.common.files import written_aside
from services.common.runs.kept_answers import protocol_file, stem_of
from services.common.runs.paths import is_run


def show_on_pages(answers: Path, run: Path, say: Callable[[str], None]) -> None:
    """Copy the answers, and how they were asked, to `eval/` of the run that they are of, unless they lie in
    its folder. A run that was never trained has no pages; a folder that cannot be written to is said."""
    if not is_run(run) or answers.resolve().is_relative_to(run.resolve()) or not answers.is_file():
        return
    copy = run / "eval" / f"{stem_of(answers) or 'answers'}.answers.jsonl"
    try:
        copy.parent.mkdir(exist_ok=True)
        files = ((answers, copy), (protocol_file(answers), protocol_file(copy)))
        for _, to in reversed(files):  # a process killed on the way leaves no pair of two evaluations
            to.unlink(missing_ok=True)
        for file, to in files:
            if file.is_file():
                with written_aside(to) as aside:
                    shutil.copyfile(file, aside)
    except OSError as error:
        say(f"{copy}: not written ({error.strerror}), so the run's pages do not show these answers")
    else:
        say(f"the run's pages show these answers too: {copy}")
