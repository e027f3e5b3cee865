"""`unspiral report`: the live page, frozen with its data in one file that needs nothing else."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

import orjson

from services.common.answers import clean_text
from services.common.errors import UserError
from services.common.files import write_atomically
from services.common.runs.ends import ending
from services.common.users_files import writing
from services.likelihood.evaluations import evaluation_text
from services.likelihood.exports.fixed_prompts import measured
from services.likelihood.exports.report_parts.paper_figures import paper_figures
from services.likelihood.exports.report_parts.trajectories import report_samples
from services.likelihood.exports.run_files import RunFiles, differences, held_out, read_run
from services.likelihood.monitor.alarms import PHASES
from services.likelihood.store import series
from services.likelihood.store.base import EVALUATION

STATIC = Path(__file__).parents[1] / "static"
SHELL = Path(__file__).parents[2] / "common" / "http" / "static"
"""What the pages of all services share."""
POINTS = 2000
"""Most points of a curve in the file."""
MOST_EVENTS = 500
"""Most events in the file beside alarms and held-out scores, which it has all of."""
FROZEN_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_dirs: list[Path], out: Path, *, paper: bool = False) -> Path:
    """One self-contained HTML page for one or several runs. Returns `out`. paper: the curves are the figures
    of the paper. Raises UserError, EnvironmentLacks."""
    runs = [read_run(Path(d)) for d in run_dirs]
    if not runs:
        raise UserError("report: expected at least one run's folder")
    _tell_apart(runs, run_dirs)
    data: dict[str, Any] = {
        "runs": [frozen(run, run_dir) for run, run_dir in zip(runs, run_dirs, strict=True)],
        "differences": differences([r.config for r in runs]) if len(runs) > 1 else [],
    }
    if paper:
        data["paper"] = paper_figures(
            {r["run"]: r["series"]["series"].keys() for r in data["runs"]},
            {run.name: measured(folder) for run, folder in zip(runs, map(Path, run_dirs), strict=True)},
        )
    with writing(f"report {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page(data))
    return out


def frozen(run: RunFiles, run_dir: Path) -> dict[str, Any]:
    """What the page needs to know of a run that lies in `run_dir`."""
    run.add_evaluations()
    columns, first = run.columns()
    monitor = run.monitor()
    codes, alarms = run.replay(monitor)
    samples = report_samples(run_dir if run_dir.is_dir() else run_dir.parent, run.config, alarms)
    thinned = series.thinned(columns, first, POINTS)
    latest = run.metrics[-1] if run.metrics else {}
    found = series.bands(codes, first, list(PHASES))
    return {
        "run": run.name,
        "steps": len(run.metrics),
        "first_step": run.metrics[0]["step"] if run.metrics else None,
        "last_step": latest.get("step"),
        "phase": found[-1]["phase"] if found else "unknown",
        "since": found[-1]["first"] if found else first,
        "metrics": {k: v for k, v in latest.items() if isinstance(v, int | float)},
        "series": thinned,
        "bands": found,
        "alarms": alarms,
        "undecided": monitor.undecided(),
        "events": _events(run.events),
        "samples": samples,
        "sampled": [{"step": kept["step"], "trajectories": len(kept["trajectories"])} for kept in samples],
        "config": run.config,
        "summary": run.summary,
        "ending": ending(run_dir, run.summary, latest.get("step", 0)) if run_dir.is_dir() else None,
    }


def page(data: dict[str, Any]) -> str:
    """live.html with its styles, scripts and data written into it."""
    html = (STATIC / "live.html").read_text(encoding="utf-8")
    html = re.sub(
        r'<link rel="stylesheet" href="/static/([^"]+)">', lambda m: f"<style>{_static(m[1])}</style>", html
    )
    html = re.sub(
        r'<script src="/static/([^"]+)"></script>', lambda m: f"<script>{_static(m[1])}</script>", html
    )
    if "paper" in data:
        after = f"<script>{_static('curves/page_curves.js')}</script>"
        html = html.replace(after, f"{after}\n<script>{_static('curves/page_paper.js')}</script>")
    body = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS).decode().replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{FROZEN_POLICY}">'
    names = ", ".join(run["run"] for run in data["runs"])
    html = html.replace("<title>Unspiral: likelihood</title>", f"<title>{escape(names)}: Unspiral</title>")
    return html.replace("<!--policy-->", policy).replace(
        "<!--data-->", f'<script type="application/json" id="frozen">{body}</script>'
    )


def _static(name: str) -> str:
    file = STATIC / name if (STATIC / name).is_file() else SHELL / name
    text = file.read_text(encoding="utf-8").replace("</script", "<\\/script")
    if name.startswith("vendor/"):  # its licence travels with it
        licence = STATIC / "vendor" / f"LICENSE.{Path(name).name.split('.')[0]}"
        text = f"/*\n{licence.read_text(encoding='utf-8')}*/\n{text}"
    return text


def _tell_apart(runs: list[RunFiles], paths: list[Path]) -> None:
    """Runs of the same name get their parent's too. A folder's name may be no UTF-8; a page is."""
    names = [r.name for r in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = f"{Path(path).resolve().parent.name}/{run.name}"
        run.name = clean_text(run.name)


def _events(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All held-out scores and the newest of the others, in their order; alarms stand by themselves."""
    events = [event for event in map(_event, recorded) if event["kind"] != "alarm"]
    others = [at for at, event in enumerate(events) if event["kind"] != EVALUATION]
    left_out = set(others[:-MOST_EVENTS])
    return [event for at, event in enumerate(events) if at not in left_out]


def _event(event: dict[str, Any]) -> dict[str, Any]:
    kind = str(event.get("kind") or event.get("event") or event.get("type") or "event")
    text = event.get("text") or event.get("message")
    if kind == EVALUATION and isinstance(event.get("overall"), dict):
        overall = event["overall"]
        tag = event.get("tag", "")
        mode = event.get("mode", "")
        text = evaluation_text(tag, mode, overall)
    if text is None:
        left_out = ("step", "kind", "event", "type", "time", "ts")
        text = ", ".join(
            f"{k} {v}" for k, v in event.items() if k not in left_out and not isinstance(v, dict | list)
        )
    out = {"step": event.get("step"), "kind": kind, "text": str(text)}
    if kind != EVALUATION:
        return out
    data = {"metrics": held_out(event)}
    if isinstance(event.get("overall"), dict):  # with the number of questions, by which its noise is judged
        data["overall"] = event["overall"]
    return out | {"data": data}
