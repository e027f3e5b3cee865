"""Pictures of every page, to be looked at: at 1440 and 390 pixels, dark and light.

    python tests/pages/pictures.py OUT RUN [RUN ..] [--strip docs/images/pages.png]
        [--report RUN docs/images/report.png]

RUN is the folder of a run with trajectories in its `likelihood.db`, as `unspiral demo --collapse` leaves two.
They are copied into one store, so that they can be compared. `--strip` and `--report` make the pictures of
the README. Needs chromium on the PATH, and the packages playwright and pillow.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / room) for room in ("pages", "control", "suite"))]

from chromium import CHROMIUM  # noqa: E402
from control_world import Run as Control  # noqa: E402
from suite_rows import evaluation  # noqa: E402

from services.control.launch import serve_in_thread as serve_control  # noqa: E402
from services.likelihood.exports.report import write_report  # noqa: E402
from services.likelihood.rest.launch import ServeSettings, serve_in_thread  # noqa: E402
from services.likelihood.store.opening import open_store  # noqa: E402
from services.settings import ControlSettings  # noqa: E402
from trainer.suite.sets import SETS  # noqa: E402

WIDTHS = {1440: 900, 390: 844}
SCHEMES = ("light", "dark")
TOKEN = "for-the-pictures"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
ID = "0123456789abcdef0123456789abcdef"
STRIP_WIDTH = 1500
GAP = 12
ROW = 430


class View(NamedTuple):
    """A page as somebody sees it."""

    name: str
    path: str
    ready: str
    """What stands on it once it is drawn: a selector."""
    prepare: Callable[[Page], Any] = lambda page: None
    token: bool = False
    """Whether the service asks for a token, and the run has a control plane."""


def copied(run: Path, http: httpx.Client) -> None:
    """Post a run's steps, trajectories and events, and what it says of itself."""
    store = open_store(str(run / "likelihood.db"))
    name = run.name
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        step = metrics.pop("step")
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and k != "attempt"}
        body = {"step": step, "attempt": metrics.get("attempt", 0), "metrics": numbers}
        http.post(f"/v1/runs/{name}/steps", json=body).raise_for_status()
        made = [t.model_dump(exclude_none=True) for t in store.samples(name, step)]
        if made:
            body = {"attempt": metrics.get("attempt", 0), "trajectories": made}
            http.post(f"/v1/runs/{name}/steps/{step}/samples", json=body).raise_for_status()
    for event in store.events(name, 10_000):
        body = {k: event[k] for k in ("step", "kind", "text", "data")}
        http.post(f"/v1/runs/{name}/events", json=body).raise_for_status()
    about = {k: v for k, v in store.about(name).items() if k != "control" and v is not None}
    http.post(f"/v1/runs/{name}/about", json=about).raise_for_status()
    store.close()


@contextmanager
def served(runs: list[Path], folder: Path, token: str | None = None) -> Iterator[str]:
    """The address of a service with the runs; with a token the last one has a control plane, and goes on."""
    with ExitStack() as parts:
        own = folder / runs[0].name  # evaluations are those of the run in whose folder the store lies
        store = str(own / "likelihood.db")
        service = parts.enter_context(serve_in_thread(ServeSettings(store=store, port=0, token=token)))
        http = parts.enter_context(
            httpx.Client(base_url=service.url, headers=BEARER if token else {}, timeout=60)
        )
        for run in runs:
            copied(run, http)
        if token:
            os.environ["UNSPIRAL_API_TOKEN"] = token
            control = parts.enter_context(
                serve_control(Control(), ControlSettings(host="127.0.0.1", port=0), print, ID)
            )
            about = {"control": {"url": control.url, "id": ID}, "ended": None}
            http.post(f"/v1/runs/{runs[-1].name}/about", json=about).raise_for_status()
        yield service.url


def evaluated(run: Path) -> None:
    """Two evaluations in a run's folder."""
    for name, share in (("search7-agent", 7), ("search7-rag", 4)):
        evaluation(run / "eval" / name, {one: [i < share for i in range(10)] for one in SETS})


def first_alarm(url: str, run: str) -> dict[str, Any]:
    """The alarm that was raised first."""
    found: list[dict[str, Any]] = httpx.get(f"{url}/v1/runs/{run}/alarms").raise_for_status().json()
    return min(found, key=lambda alarm: alarm["step"])


def views(url: str, runs: list[Path]) -> list[View]:
    """Every page of the service, and of a report."""
    one = runs[0].name
    both = ",".join(run.name for run in runs)
    alarm = first_alarm(url, one)
    at = f"/runs/{one}/steps/{alarm['step']}"
    curve = "figure:not([hidden]) canvas"

    def unfolded(page: Page) -> None:
        figure = page.locator("figure", has_text="Time of a step")
        figure.evaluate("(figure) => { figure.closest('details').open = true; }")  # folded on a phone
        figure.locator("summary").click()
        figure.locator("td").first.wait_for()

    def enter(page: Page) -> None:
        page.get_by_role("button", name="Control this run").click()
        page.get_by_label("API token for control").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        page.get_by_role("button", name="Pause").wait_for()

    return [
        View("overview", f"/#runs={one}", curve),
        View("compare", f"/#runs={both}&minus={runs[-1].name}", curve),
        View("both", f"/#runs={both}", curve),
        View("pinned", f"/#runs={one}&pin={alarm['step']}", "#pinned .pin-head"),
        View("about", f"/#runs={both}&tab=about", ".configuration"),
        View("scores", f"/#runs={both}&tab=evaluations", "table.evaluations"),
        View("full", f"/#runs={both}&full=Time%20of%20a%20step", "figure.full canvas"),
        View("values", f"/#runs={both}&others=1", curve, unfolded),
        View("change", f"/#runs={one}", curve, lambda p: p.get_by_label(f"Change {one}").click()),
        View("login", "/", "input[type=password]", token=True),
        View("control", f"/#runs={runs[-1].name}", "#control .control-state", enter, token=True),
        View("step", at, ".side .t"),
        View("alarm", f"{at}?rule={alarm['rule']}", ".strip .t.at"),
        View("prompt", f"/runs/{one}/prompts", ".line"),
        View("evaluations", f"/runs/{one}/evaluations", ".listed"),
        View("suite", f"/runs/{one}/evaluations/search7-agent", "table"),
    ]


def opened(browser: Browser, url: str, view: View, width: int, scheme: str) -> Page:
    """A page that is drawn."""
    page = browser.new_page(
        viewport={"width": width, "height": WIDTHS[width]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    if view.token and view.name != "login":
        page.goto(url)
        page.get_by_label("API token").fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_selector("#first")
        page.goto("about:blank")
    page.goto(f"{url}{view.path}")
    page.wait_for_selector(view.ready)
    view.prepare(page)
    page.wait_for_timeout(500)
    return page


def beside(parts: list[Image.Image]) -> Image.Image:
    """Parts side by side on white, as wide as the strip."""
    whole = Image.new(
        "RGB", (sum(p.width for p in parts) + GAP * (len(parts) - 1), max(p.height for p in parts)), "white"
    )
    at = 0
    for part in parts:
        whole.paste(part, (at, 0))
        at += part.width + GAP
    return whole.resize((STRIP_WIDTH, whole.height * STRIP_WIDTH // whole.width))


def strip(browser: Browser, url: str, runs: list[Path], out: Path) -> None:
    """Three views below each other: the first screen, a right answer beside a wrong one, one answer's tokens
    through time."""
    found = {view.name: view for view in views(url, runs)}
    rows = []
    for name, selectors in (
        ("overview", ["#first .answers"]),
        ("step", [".pair"]),
        ("prompt", [".one-token", ".along table"]),
    ):
        page = opened(browser, url, found[name], 1440, "light")
        shots = [page.locator(selector).first.screenshot() for selector in selectors]
        row = beside([Image.open(io.BytesIO(shot)).convert("RGB") for shot in shots])
        rows.append(row.crop((0, 0, STRIP_WIDTH, min(row.height, ROW))))
        page.close()
    whole = Image.new("RGB", (STRIP_WIDTH, sum(r.height for r in rows) + GAP * (len(rows) - 1)), "white")
    at = 0
    for row in rows:
        whole.paste(row, (0, at))
        at += row.height + GAP
    small(whole, out)


def small(picture: Image.Image, out: Path) -> None:
    """Write a picture in 256 colours."""
    picture.quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size // 1024} KiB, {picture.width} x {picture.height}")


def of_report(browser: Browser, run: Path, out: Path) -> None:
    """The first screens of a run's report."""
    with tempfile.TemporaryDirectory() as folder:
        report = write_report([run], Path(folder) / "report.html")
        page = browser.new_page(viewport={"width": 1280, "height": 1260}, color_scheme="light")
        page.goto(report.as_uri())
        page.wait_for_selector("figure:not([hidden]) canvas")
        page.wait_for_timeout(500)
        small(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), out)
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--strip", type=Path)
    parser.add_argument(
        "--report", type=Path, nargs=2, metavar=("RUN", "FILE"), help="Picture of its report."
    )
    parser.add_argument("--only", nargs="*", help="Names of views; all if left out.")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as parts:
        made = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        open_url = parts.enter_context(served(given.runs, made / "open"))
        token_url = parts.enter_context(served(given.runs, made / "token", TOKEN))
        report = write_report([*given.runs], made / "report.html")
        play = parts.enter_context(sync_playwright())
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        if given.strip:
            strip(browser, open_url, given.runs, given.strip)
        if given.report:
            of_report(browser, *given.report)
        evaluated(made / "open" / given.runs[0].name)
        all_views = [
            *views(open_url, given.runs),
            View("report", report.as_uri(), "figure:not([hidden]) canvas"),
        ]
        for view, width, scheme in itertools.product(all_views, WIDTHS, SCHEMES):
            if given.only is not None and view.name not in given.only:
                continue
            url = "" if view.name == "report" else token_url if view.token else open_url
            page = opened(browser, url, view, width, scheme)
            sideways = page.evaluate("document.documentElement.scrollWidth") > width
            page.screenshot(path=given.out / f"{view.name}-{width}-{scheme}.png", full_page=True)
            print(view.name, width, scheme, "SCROLLS SIDEWAYS" if sideways else "")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
