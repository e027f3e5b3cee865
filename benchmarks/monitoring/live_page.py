"""How quick the live page is over a long run: until it is drawn, per redraw, and per move of the pointer.

    python benchmarks/monitoring/live_page.py [--steps 10000] [--rounds 5]

Chromium draws the page of a stored run with 50 metrics per step, 1,400 x 900 pixels, without a GPU. `load`:
seconds from the request of the page until the first curve is there. `redraw`: seconds of one `draw`, which
each posted step causes. `move`: seconds of a move of the pointer over a curve, which moves the cursor of all
of them. Medians over the rounds; the first load, which fills caches, is left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from services.likelihood.rest.launch import ServeSettings, serve_in_thread  # noqa: E402
from services.likelihood.store import series  # noqa: E402
from services.likelihood.store.sqlite.store import SQLiteStore  # noqa: E402

NAMED = (
    *("probe/lag", "probe/fixed", "logp/right", "logp/wrong", "displacement/mean", "displacement/p10"),
    *("displacement/p90", "displacement/share_negative", "reward/mean", "reward/em", "entropy", "grad_norm"),
    *("ratio/max", "policy/clip_fraction", "kl/ref", "llds/loss", "rollout/length", "rollout/searches"),
    *("rollout/valid", "rollout/tokens_per_s", "time/step", "time/rollout", "time/update", "time/sync"),
)
OTHER = tuple(f"own/metric_{i}" for i in range(26))
REDRAW = "() => { const t = performance.now(); Unspiral.app.draw(); return (performance.now() - t) / 1000; }"
MOVE = """() => {
    const u = Unspiral.app.charts.flatMap((g) => g.charts).find((c) => c.u && c.u.width).u;
    const t = performance.now();
    for (let x = 10; x < 210; x += 10) u.setCursor({ left: x, top: 50 }, true, true);
    return (performance.now() - t) / 20000;
}"""


def store_run(path: Path, steps: int) -> None:
    """A run of so many steps, written into the store's tables as posts would."""
    rng = np.random.default_rng(0)
    store = SQLiteStore(path)
    with store._file.writing() as db:
        run_id, _ = store._enter(db, "long", 0, 0)
        for name in (*NAMED, *OTHER, "phase"):
            values = np.full(-(-steps // series.CHUNK) * series.CHUNK, np.nan)
            values[:steps] = 1.0 if name == "phase" else 0.5 + np.cumsum(rng.normal(0, 0.003, steps))
            for number, chunk in enumerate(values.reshape(-1, series.CHUNK)):
                row = (run_id, name, number, chunk.tobytes())
                db.execute("INSERT INTO chunk (run, name, chunk, data) VALUES (?,?,?,?)", row)
        db.executemany(
            "INSERT INTO step (run, step, attempt, time, posted, derived, trajectories) "
            "VALUES (?,?,0,0,'{}','{}',0)",
            [(run_id, step) for step in range(steps)],
        )
    store.close()


def one_round(browser: Any, url: str) -> dict[str, float]:
    """Seconds of one load, one redraw and one move."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    began = time.perf_counter()
    page.goto(url)
    page.wait_for_selector("figure:not([hidden]) canvas")
    page.wait_for_selector(".status.live")
    load = time.perf_counter() - began
    redraws = [page.evaluate(REDRAW) for _ in range(5)]
    out = {"load": load, "redraw": statistics.median(redraws), "move": page.evaluate(MOVE)}
    page.close()
    return out


def measure(steps: int, rounds: int) -> dict[str, Any]:
    """Medians of the rounds."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        store_run(Path(folder) / "l.db", steps)
        server = serve_in_thread(ServeSettings(store=str(Path(folder) / "l.db"), port=0))
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        one_round(browser, server.url)
        found = [one_round(browser, server.url) for _ in range(rounds)]
        browser.close()
        server.stop()
    medians = {key: round(statistics.median(f[key] for f in found), 4) for key in found[0]}
    return {"steps": steps, "metrics": len(NAMED) + len(OTHER), "rounds": rounds, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found = measure(given.steps, given.rounds)
    print(json.dumps(found | {"python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
