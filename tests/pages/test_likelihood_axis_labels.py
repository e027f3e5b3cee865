"""Labels of the charts' axes in a real Chromium: none is cut, whatever the size of the numbers."""

import json

import pytest
from chromium import CHROMIUM

from services.likelihood.exports.report import write_report

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

RECORD = """
window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const width = this.measureText(text).width;
  const start = { right: x - width, end: x - width, center: x - width / 2 }[this.textAlign] ?? x;
  window.drawn.push({ canvas: this.canvas, text, left: start, right: start + width });
  return draw.apply(this, arguments);
};
"""
LABELS_OF = """
(title) => {
  const titled = (f) => f.querySelector("strong").textContent === title;
  const figure = [...document.querySelectorAll("figure")].find(titled);
  const canvas = figure.querySelector("canvas");
  const labels = window.drawn.filter((d) => d.canvas === canvas && d.text);
  return labels.map((d) => ({ text: d.text, left: d.left, right: d.right, width: canvas.width }));
}
"""
VALUES = {
    "learner/lr": lambda i: 1e-7 * i,
    "learner/lr_small": lambda i: 3e-5,
    "rollout/tokens_seen": lambda i: 1e6 + 2e5 * i,
    "loss/tiny": lambda i: -2.5e-7 * (i + 1),
    "loss/huge": lambda i: -1234567.0 * (i + 1),
    "offset": lambda i: 1000001 + i / 10,
    "kl/ref": lambda i: 3e-5 + 1e-6 * i,
    "plain": lambda i: 0.1 * i,
}
TITLES = {"kl/ref": "KL to the reference"}


@pytest.fixture(scope="module", params=[1.0, 2.0], ids=["plain screen", "dense screen"])
def labels(request, tmp_path_factory):
    """{metric: the labels drawn on its chart, with their edges in the canvas's own pixels}."""
    from playwright.sync_api import sync_playwright

    folder = tmp_path_factory.mktemp("run")
    rows = [{"step": 99990 + i} | {name: value(i) for name, value in VALUES.items()} for i in range(12)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = write_report([folder], folder / "report.html")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900}, device_scale_factor=request.param)
        page.add_init_script(RECORD)
        page.goto(report.as_uri() + "#others=1")  # they are folded otherwise
        page.wait_for_selector("figure:not([hidden]) canvas")
        found = {name: page.evaluate(LABELS_OF, TITLES.get(name, name)) for name in VALUES}
        browser.close()
    return found


def test_no_label_of_an_axis_is_cut(labels):
    cut = [
        (name, d) for name, drawn in labels.items() for d in drawn if d["left"] < 0 or d["right"] > d["width"]
    ]
    assert cut == []
    assert all(len(drawn) > 3 for drawn in labels.values())


def test_tiny_and_huge_numbers_are_powers_of_ten_and_neighbours_differ(labels):
    seen = {name: [d["text"] for d in drawn] for name, drawn in labels.items()}
    assert "1e−6" in seen["learner/lr"] and "−1e−6" in seen["loss/tiny"]
    assert "2e6" in seen["rollout/tokens_seen"] and "−1e7" in seen["loss/huge"]
    assert "0.5" in seen["plain"] and not any("e" in text for text in seen["plain"])
    for name, texts in seen.items():
        once = [t for t in texts if not t.startswith(("99", "1000", "100,"))] if name != "offset" else texts
        assert len(set(once)) > 2, name
