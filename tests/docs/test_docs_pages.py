"""Pages of names: every metric is on the page of metrics, and every key that a page names is a key."""

import re
from types import SimpleNamespace

import pytest
from page_parts import code_block
from places import ROOT

from services.contracts import Question
from services.likelihood.monitor.detectors.table import READS
from trainer.config.schema import Config, default_of, load_config, paths_of

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
GROUPS = (
    "displacement|eval|grad_norm|groups|importance|kl|leak|learner|llds|logp|mismatch|nll|policy|probe|ratio|"
    "retrieval|reward|rollout|supervised|sync|text|time"
)
COUNTS_OF_TERMS = (
    r"(llds|policy|kl|batch_kl)/(count|loss|clipped_tokens|action_tokens|zero_weight_tokens|preserved_\w+)"
)
"""Sums inside the learner, of which its metrics are made."""
AT_THE_END = {"learner/flops_per_s", "learner/mfu", "learner/tokens_per_s", "sync/seconds"}
"""Of the summary's `performance`, not of a step."""


def described():
    return {name for row in ROWS for name in re.findall(r"`([\w/]+)`", row.split(" | ")[0])}


def undescribed(names):
    """Names that the page lacks. An index at the end is that of any action, round or step."""
    page = described()
    plain = {re.sub(r"_\d+$|_(\{\w+\})?$", "_0", name) if "_" in name else name for name in names}
    return sorted(plain - page - {name for name in plain if re.sub(r"_0$", "", name) in page})


def test_every_metric_that_is_drawn_or_judged_or_computed_is_described():
    curves = (ROOT / "services" / "likelihood" / "static" / "curves" / "page_curves.js").read_text(
        encoding="utf-8"
    )
    drawn = set(re.findall(rf'"((?:{GROUPS})/[a-z_0-9]+)"', curves))
    judged = {name for names in READS.values() for name in names}
    computed = set()
    for folder in ("trainer/loop", "trainer/learner", "services/likelihood/metrics"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            computed |= set(re.findall(rf'(?<!f)"((?:{GROUPS})/[a-z_0-9]+)"', text))
    computed = {n for n in computed if not re.fullmatch(COUNTS_OF_TERMS, n)} - AT_THE_END
    computed = {n for n in computed if not re.search(r"[/_]p$", n)}  # the beginning of p10, p50, ..
    assert len(drawn) > 30 and len(computed) > 40
    assert undescribed(drawn | judged | computed) == []


def test_metrics_have_one_table_of_their_meaning():
    """Other pages name metrics, and say what they do with them; docs/metrics.md says what each is."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
        tables = [row for row in rows if re.match(rf"\| `({GROUPS}|data|system)/", row)]
        assert page.name == "metrics.md" or len(tables) < 5, page.name
    assert "[metrics.md](metrics.md)" in (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")


def test_each_row_has_unit_meaning_good_and_bad():
    assert len(ROWS) > 50
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 5 and all(cells), row


@pytest.mark.parametrize(
    "page", ["migrating", "not_learning", "tutorial", "extend", "metrics", "run_folder", "settings"]
)
def test_keys_that_a_page_names_are_keys(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    if page == "migrating":  # the first column alone is ours
        text = "\n".join(line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `"))
    sections = "|".join(Config.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:: [^`]+)?`", text))
    others = {"trainer.rewards", "control.json"}  # a module, a file
    assert named - set(paths_of(Config)) - others == set()
    assert len(named) >= {"migrating": 25, "tutorial": 0}.get(page, 1)


def test_the_first_page_leads_to_every_page():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\((\w+\.md)\)", text)) == set()


def test_the_example_of_migrating_is_a_configuration_and_a_reward(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(code_block(page, "yaml"))
    config = load_config(tmp_path / "mine.yaml")
    assert (config.rollout.prompts_per_step, config.learner.minibatches_per_batch) == (512, 2)
    (tmp_path / "my_verl_reward.py").write_text(
        "def compute_score(source, text, truth, extra):\n"
        "    return float(source == 'nq' and truth['target'][0] in text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    exec(code_block(page, "python"), found)
    asked = Question("q", "where?", ("Rome",), "nq")
    assert [found["reward"](SimpleNamespace(question=asked, model_text=t)) for t in ("Rome", "Lima")] == [
        1,
        0,
    ]
    found["compute_score"] = lambda source, text, truth, extra: {"score": 0.25, "acc": True}
    assert found["reward"](SimpleNamespace(question=asked, model_text="Rome")) == 0.25


def test_defaults_that_the_page_of_settings_states_are_the_defaults():
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)` \(([\d.e-]+|`\w+`)(?=[,;:) ])", text))
    found = {key: default_of(key) for key in stated}
    assert len(stated) > 25
    assert {k: v for k, v in stated.items() if v.strip("`") != str(found[k]) and float(v) != found[k]} == {}
