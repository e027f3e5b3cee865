"""The page of results beside the papers' rows: a file of its own, with the numbers of the tables."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import httpx
import pytest
from chromium import CHROMIUM, browser  # noqa: F401
from suite_rows import evaluation

from services.common.errors import UserError
from services.common.users_files import load_object
from services.likelihood.rest.launch import ServeSettings, serve_in_thread
from trainer.suite.cli import page_command
from trainer.suite.sets import SETS
from trainer.suite.shown.published import PUBLISHED
from trainer.suite.shown.tables import COLUMNS, short


class Cells(HTMLParser):
    """The texts of the table's cells by row, and the addresses that the page names."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.addresses, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.addresses += [v for k, v in attrs if k in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th", "small", "span")
        if tag in ("td", "th"):
            self.rows[-1].append([])

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1].append(data)


def made(tmp_path, name, share, **more):
    right = {one: [i < share * 10 for i in range(10)] for one in SETS}
    return evaluation(tmp_path / name, right, **more)


def test_ours_and_the_papers_rows_stand_below_the_same_heads(tmp_path):
    a = made(tmp_path, "a", 0.3, model="runs/<b>mine</b>", method="rag")
    b = made(tmp_path, "b", 0.8)
    page_command([a, b], tmp_path / "out.html")
    found = Cells((tmp_path / "out.html").read_text())
    assert found.addresses == [], "nothing is loaded"
    ours = [row for row in found.rows if len(row) == len(COLUMNS) + 1 and len(row[1]) == 2]
    assert [row[0] for row in ours] == [["runs/<b>mine</b>", "rag"], ["m", "agent"]]
    for row, folder in zip(ours, (a, b), strict=True):
        result = load_object(folder / "result.json")
        for name, cell in zip(COLUMNS, row[1:], strict=True):
            given = (result["sources"] | result["averages"])[name]["em"]
            assert cell == [short(given["mean"]), f"{short(given['low'])}–{short(given['high'])}"]
    printed = {
        tuple(row[0]): row[1:] for row in found.rows if len(row) == len(COLUMNS) + 1 and row not in ours
    }
    for one in PUBLISHED:
        cells = printed[one.model, one.method]
        assert [cells[COLUMNS.index(name)] for name in SETS] == [[short(value)] for value in one.em]
        assert cells[COLUMNS.index("macro")] == [short(one.macro)] and cells[COLUMNS.index("micro")] == ["-"]


def test_methods_stand_in_one_table_of_the_form_that_the_files_name_says(tmp_path):
    folders = [made(tmp_path, "a", 0.3, method="rag"), made(tmp_path, "b", 0.8, model="x_y")]
    for ending in ("md", "tex", "json"):
        page_command(folders, tmp_path / f"out.{ending}")
    text = (tmp_path / "out.md").read_text()
    ours, papers = text.split("## As papers print it")
    lines = [line for line in ours.splitlines() if line.startswith(("| m,", "| x_y,"))]
    assert [line.split(" | ")[0] for line in lines] == ["| m, rag", "| x_y, agent"]
    assert [line.split(" | ")[4].split()[0] for line in lines] == [".300", ".800"]
    assert (
        ours.count("70 questions, greedy") == 2 and "| Qwen2.5-3B, RAG (arXiv 2503.09516 v5) | .348" in papers
    )
    tex = (tmp_path / "out.tex").read_text()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\bottomrule") == 1
    numbers = [line for line in tex.splitlines() if line.startswith(("m, rag &", r"x\_y, agent &"))]
    assert [line.split(" & ")[1:5] for line in numbers] == [[".300"] * 4, [".800"] * 4]
    assert all(line.count("&") == len(COLUMNS) for line in tex.splitlines() if r"\\" in line)
    printed = [line for line in tex.splitlines() if "% arXiv" in line]
    assert len(printed) == len(PUBLISHED) and all(line.startswith("% ") for line in printed)
    assert (
        r"% Qwen2.5-3B, RAG & .348 & .544 & .387 & -- & .255 & .226 & .047 & .080 & -- & .270 & -- \\" in tex
    )
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [column["key"] for column in rows["columns"]] == list(COLUMNS)
    assert [(r["method"], r["em"]["macro"]["mean"]) for r in rows["measured"]] == [
        ("rag", pytest.approx(0.3)),
        ("agent", pytest.approx(0.8)),
    ]
    (llds,) = (r for r in rows["printed"] if r["model"] == "Qwen2.5-7B-Base" and r["method"] == "GRPO + LLDS")
    assert llds["em"]["macro"] == 0.48 and "micro" not in llds["em"]


def test_each_evaluation_leaves_its_page_and_says_what_is_measured(tmp_path):
    text = (made(tmp_path, "a", 0.5) / "table.html").read_text()
    assert re.search(r"As printed in arXiv 2512\.04220 v2, not measured here", text)
    assert "70 questions, greedy" in text and "default-src &#x27;none&#x27;" not in text
    with pytest.raises(UserError, match="no such evaluation"):
        page_command([tmp_path / "none"], tmp_path / "out.html")


def test_the_service_of_a_run_shows_its_evaluations_behind_the_same_token(tmp_path):
    run = tmp_path / "my-run"
    (run / "eval").mkdir(parents=True)
    made(run / "eval", "search7-rag", 0.5)
    (run / "eval" / "secret.html").write_text("x")
    settings = ServeSettings(store=str(run / "likelihood.db"), port=0, token="let me in")
    served = serve_in_thread(settings)
    try:
        asked = httpx.Client(base_url=served.url, headers={"Authorization": "Bearer let me in"}, timeout=30)
        listed = asked.get("/runs/my-run/evaluations")
        assert listed.status_code == 200 and 'href="evaluations/search7-rag"' in listed.text
        shown = asked.get("/runs/my-run/evaluations/search7-rag")
        back = '<p><a href="/runs/my-run/evaluations">← evaluations of my-run</a></p>'
        assert shown.text.replace(back, "") == (run / "eval" / "search7-rag" / "table.html").read_text()
        assert shown.text.count(back) == 1
        assert "default-src 'none'" in shown.headers["Content-Security-Policy"]
        assert "No run other in this store." in asked.get("/runs/other/evaluations").text
        for missing in ("none", "secret.html", "..%2Fsearch7-rag"):
            assert asked.get(f"/runs/my-run/evaluations/{missing}").status_code in (404, 422), missing
        rows = asked.get("/v1/runs/my-run/evaluations/search7-rag").json()
        assert rows["measured"][0]["em"]["nq"]["mean"] == 0.5 and len(rows["printed"]) == len(PUBLISHED)
        (run / "eval" / "search7-rag" / "table.json").unlink()
        assert asked.get("/v1/runs/my-run/evaluations/search7-rag").status_code == 404
        for path in ("/runs/my-run/evaluations", "/v1/runs/my-run/evaluations/search7-rag"):
            assert httpx.get(f"{served.url}{path}", timeout=30).status_code == 401
    finally:
        served.stop()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_on_a_phone_the_headings_of_the_parts_are_read_whole_wherever_the_table_is_moved_to(
    tmp_path, browser
):
    page_command([made(tmp_path, "a", 0.3)], tmp_path / "out.html")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "out.html").as_uri())
    table = page.locator(".wide")
    assert table.evaluate("e => e.scrollWidth - e.clientWidth") > 400, "the table itself is wider"
    heads = """all => all.map(th => { const words = document.createRange(); words.selectNodeContents(th);
      const box = words.getBoundingClientRect(); return [th.textContent, box.left, box.right]; })"""
    for moved in (0, 200):
        table.evaluate("(e, x) => e.scrollTo(x, 0)", moved)
        found = page.locator("tr.part th").evaluate_all(heads)
        assert found[0][0].startswith("Measured here") and len(found) > 2
        assert all(left >= 0 and right <= 390 for _, left, right in found), found
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()
