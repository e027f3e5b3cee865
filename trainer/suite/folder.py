"""The folder of an evaluation: its plan, its answers, its result and the tables made of it.

plan.json       suite, method, model and protocol; written before the first answer
answers.jsonl   one row for each question and sample
result.json     scores, intervals and the plan
table.md, table.tex, table.html, table.json
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.files import write_atomically, write_json
from services.common.users_files import load_object, make_folder
from trainer.suite.protocol import UNKNOWN, differing
from trainer.suite.result import RESULT_FILE
from trainer.suite.shown.page import page
from trainer.suite.shown.tables import as_printed, latex, markdown, rows_of

PLAN_FILE = "plan.json"


def begin(folder: Path, plan: dict[str, Any], say: Callable[[str], None]) -> None:
    """Make the folder, or go on in one of the same plan. Raises UserError where its answers came by another
    plan, naming the first difference: rows of two protocols must not meet in one table."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; expected a folder for the answers and tables")
    make_folder(folder, f"--out {folder}")
    file = folder / PLAN_FILE
    if file.is_file():
        before = load_object(file)
        for part in ("suite", "method"):
            if before.get(part) != plan[part]:
                raise UserError(_other(folder, f"{part}: {before.get(part)} | {plan[part]}"))
        untold = _told_by_one(*(one.get("protocol", {}).get("retriever") for one in (before, plan)))
        then, now = (_without(one, untold) for one in (before, plan))
        for part in ("model", "protocol"):
            ignored = ("name",) if part == "model" else ("versions", "prompt_example")
            if changed := differing(then.get(part, {}), now[part], ignored):
                raise UserError(_other(folder, changed[0]))
        if untold:
            first, second = (one["protocol"]["retriever"] for one in (before, plan))
            for line in differing(*({k: f.get(k, UNKNOWN) for k in untold} for f in (first, second))):
                say(f"the retriever did not tell this both times, so it is not compared: {line}")
            known = {k: first[k] for k in untold if first.get(k, UNKNOWN) != UNKNOWN}
            plan = plan | {"protocol": plan["protocol"] | {"retriever": second | known}}
        for line in differing(before["protocol"].get("versions", {}), plan["protocol"]["versions"]):
            say(f"another version than that of the answers there: {line}")
    elif any(folder.glob("answers.jsonl")):
        raise UserError(
            f"{folder}: holds answers without {PLAN_FILE}, so their protocol is unknown; give another --out"
        )
    write_json(file, plan, indent=1, ensure_ascii=False)


def _told_by_one(before: Any, now: Any) -> list[str]:
    """Facts of a retriever that are unknown to one of two plans: after an upgrade a server tells more of the
    same index."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return []
    facts = [(key, before.get(key, UNKNOWN), now.get(key, UNKNOWN)) for key in {**before, **now}]
    return [key for key, old, new in facts if (old == UNKNOWN) != (new == UNKNOWN)]


def _without(plan: dict[str, Any], untold: list[str]) -> dict[str, Any]:
    """The plan without these facts of its retriever."""
    if not untold:
        return plan
    retriever = {k: v for k, v in plan["protocol"]["retriever"].items() if k not in untold}
    return plan | {"protocol": plan["protocol"] | {"retriever": retriever}}


def _other(folder: Path, difference: str) -> str:
    return f"{folder}: its answers came by another plan ({difference}); give another --out"


def finish(folder: Path, result: dict[str, Any]) -> None:
    """Write the result, and its tables."""
    write_json(folder / RESULT_FILE, result, indent=1, ensure_ascii=False)
    write_atomically(folder / "table.md", f"{markdown(result)}\n{as_printed()}")
    write_atomically(folder / "table.tex", latex(result))
    write_json(folder / "table.json", rows_of([result]), ensure_ascii=False)
    write_atomically(folder / "table.html", page([result]))
