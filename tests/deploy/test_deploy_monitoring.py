"""Prometheus rules and Grafana dashboards: every expression parses, and every metric in them is one that a
service serves."""

import json
import re

import promql_parser
import pytest
from fastapi.testclient import TestClient
from places import ROOT
from ruamel.yaml import YAML

from retriever_service.http.metrics import Metrics
from services.likelihood.records import StepRecord
from services.likelihood.rest.server import create_app
from services.likelihood.store.opening import open_store
from services.settings import MonitorRules

LABELS = re.compile(r'unspiral_run_metric\{[^}]*name="([^"]+)"')


def rules():
    groups = YAML(typ="safe").load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    return {f"{g['name']}/{r.get('alert') or r['record']}": r for g in groups for r in g["rules"]}


def dashboards():
    return {
        p.stem: json.loads(p.read_text()) for p in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    }


EXPRESSIONS = {name: rule["expr"] for name, rule in rules().items()} | {
    f"{board}: {panel['title']} {target['refId']}": target["expr"]
    for board, content in dashboards().items()
    for panel in content["panels"]
    for target in panel["targets"]
}


def names(node):
    """Metrics of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        return {node.name}
    if isinstance(node, promql_parser.MatrixSelector):
        return names(node.vector_selector)
    found = set()
    for part in ("expr", "lhs", "rhs", "param"):
        inner = getattr(node, part, None)
        found |= names(inner) if inner is not None else set()
    for argument in getattr(node, "args", None) or ():
        found |= names(argument)
    return found


def parsed(expression):
    return promql_parser.parse(expression.replace("$run", ".*"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Names of the samples that the services' /metrics hold, after one step was posted; `up` is Prometheus'
    own."""
    store = open_store(str(tmp_path_factory.mktemp("metrics") / "likelihood.db"))
    client = TestClient(create_app(store, None, MonitorRules(), None))
    step = StepRecord(step=1, metrics={"reward/mean": 0.5}, trajectories=[])
    assert client.post("/v1/runs/r/steps", json=step.model_dump(mode="json")).is_success
    client.post("/v1/runs/r/steps", json={})
    metrics = Metrics()
    metrics.requests.labels("/retrieve", "200").inc()
    pages = [client.get("/metrics").text, metrics.page().decode()]
    found = {
        line.split("{")[0].split(" ")[0]
        for page in pages
        for line in page.splitlines()
        if line and line[0] != "#"
    }
    return found | {"up"}


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_expressions_parse_and_name_metrics_that_exist(where, served):
    found = names(parsed(EXPRESSIONS[where]))
    recorded = {r["record"] for r in rules().values() if "record" in r}
    assert found, "an expression without a metric"
    assert found <= served | recorded


def test_run_metrics_shown_are_those_that_a_run_writes():
    rooms = [*(ROOT / "trainer").rglob("*.py"), ROOT / "services/likelihood/metrics/step_metrics.py"]
    written = set(re.findall(r'"([a-z_/]+)"', "".join(p.read_text() for p in rooms)))
    for run in (ROOT / "tests/data/demo_runs").glob("*.jsonl"):
        written |= json.loads(run.read_text().splitlines()[0]).keys()
    shown = {name for e in EXPRESSIONS.values() for name in LABELS.findall(e)}
    assert len(shown) > 20
    assert shown - written == set()


def test_rules_say_what_to_look_at_and_scrapes_reach_services_of_the_compose_file():
    for name, rule in rules().items():
        assert "record" in rule or (
            rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")
        ), name
    config = YAML(typ="safe").load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    services = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())["services"]
    targets = {
        t for job in config["scrape_configs"] for s in job.get("static_configs", []) for t in s["targets"]
    }
    assert {"retriever:8000", "likelihood:8100", "control:8200"} <= targets
    scraped = {
        n for job in config["scrape_configs"] for s in job.get("dns_sd_configs", []) for n in s["names"]
    }
    assert scraped | {t.split(":")[0] for t in targets} <= services.keys()
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    watched = set(
        re.findall(r"[a-z]+", re.search(r'up\{job=~"([^"]+)"', EXPRESSIONS["services/ServiceDown"])[1])
    )
    assert watched == jobs - {"ray"}, "nodes come and go"


def selectors(node):
    """Vector selectors of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    parts = [getattr(node, p, None) for p in ("vector_selector", "expr", "lhs", "rhs")] + list(
        getattr(node, "args", None) or ()
    )
    return [s for part in parts if part is not None for s in selectors(part)]


def test_each_kind_of_node_is_missed_when_it_is_gone():
    """A node that is down has no name, so no series: only `absent` sees that, and only if it asks for this
    kind alone."""
    config = YAML(typ="safe").load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    ray = next(job for job in config["scrape_configs"] if job["job_name"] == "ray")
    assert {"source_labels": ["__meta_dns_name"], "target_label": "node"} in ray["relabel_configs"]
    kinds = set()
    for rule in rules().values():
        for selector in selectors(parsed(rule["expr"])):
            label = {m.name: m.value for m in selector.matchers.matchers}
            if selector.name == "up" and label.get("job") == "ray":
                assert rule["expr"].startswith("absent(up{"), rule["alert"]
                kinds.add(
                    frozenset(n for n in ray["dns_sd_configs"][0]["names"] if re.fullmatch(label["node"], n))
                )
    assert kinds == {
        frozenset({"ray-head"}),
        frozenset({"learner", "learner-gpu"}),
        frozenset({"rollout", "rollout-gpu"}),
    }


def test_a_run_younger_than_the_window_is_not_said_to_stand_still():
    """`changes` over 30 minutes is 0 from the first sample on: a step of seven minutes would be an alarm."""
    expression = rules()["runs/RunStandsStill"]["expr"]
    assert expression == "changes(unspiral_run_step[30m]) == 0 and unspiral_run_step offset 30m"


def test_dashboards_have_unique_ids_and_use_the_provisioned_source():
    source = YAML(typ="safe").load(
        (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    provider = YAML(typ="safe").load(
        (ROOT / "deploy/grafana/provisioning/dashboards/unspiral.yml").read_text()
    )["providers"][0]
    mounts = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"][
        "volumes"
    ]
    assert any(f":{provider['options']['path']}:" in m for m in mounts)
    uids = [b["uid"] for b in dashboards().values()]
    assert len(set(uids)) == len(uids)
    for board in dashboards().values():
        ids = [p["id"] for p in board["panels"]]
        assert len(set(ids)) == len(ids)
        assert {t["datasource"]["uid"] for p in board["panels"] for t in p["targets"]} == {source["uid"]}
