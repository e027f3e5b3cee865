"""docker-compose.yml against the code: each command line, port, health check, volume and variable in it."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from places import ROOT
from ruamel.yaml import YAML

from services.control.gateway import Gateway
from services.control.server import create_app as control_app
from services.likelihood.rest.launch import ServeSettings
from services.likelihood.rest.server import create_app
from services.likelihood.store.opening import open_store
from services.settings import MonitorRules
from trainer.commands.cli import app
from trainer.config.schema import load_config

BIN = Path(sys.executable).parent
OURS = ("unspiral-retriever", "unspiral-likelihood", "unspiral-node:cpu", "unspiral-node:gpu")
ONE_SHOT = {"index", "job"}


def compose(folder, *arguments, env=None):
    clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    command = [BIN / "docker-compose", *arguments]
    return subprocess.run(
        command, cwd=folder, env=clean | (env or {}), capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The files that Compose reads, with a .env made as the manual says."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "deploy").mkdir()
    for name in ("docker-compose.yml", ".env.example", "deploy/new_env.sh"):
        shutil.copy(ROOT / name, folder / name)
    subprocess.run([folder / "deploy/new_env.sh"], check=True, capture_output=True, timeout=30)
    return folder


@pytest.fixture(scope="module")
def stack(checkout):
    """The resolved file, all profiles."""
    done = compose(checkout, "--profile", "*", "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def words(service):
    """Entrypoint and command, with the image's own entrypoint where the file names none. Compose doubles
    dollars."""
    entrypoint = service.get("entrypoint") or (
        ["unspiral"] if "retriever" in service["image"] or "likelihood" in service["image"] else []
    )
    return [word.replace("$$", "$") for word in [*entrypoint, *(service.get("command") or [])]]


def parse(command, arguments):
    """Arguments of a click command, parsed but not run."""
    return command.make_context(command.name, list(arguments)).params


def load_script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compose_takes_the_file_and_the_profiles_choose_the_nodes(checkout):
    for profiles, nodes in ((["cpu"], {"learner", "rollout"}), (["gpu"], {"learner-gpu", "rollout-gpu"})):
        flags = [x for p in profiles for x in ("--profile", p)]
        done = compose(checkout, *flags, "config", "--services")
        assert done.returncode == 0, done.stderr
        always = {"index", "retriever", "redis", "likelihood", "ray-head", "control"}
        assert set(done.stdout.split()) == always | nodes
    by_default = compose(checkout, "config", "--services")
    assert {"learner", "rollout"} <= set(by_default.stdout.split()), "COMPOSE_PROFILES of .env"


def test_every_service_command_is_one_that_the_command_line_takes(stack):
    click_app = typer.main.get_command(app)
    serving = {}
    for name, service in stack["services"].items():
        line = words(service)
        if line[:1] == ["env"]:  # which only has a signal wait
            assert line[1] == "--block-signal=USR1" and "retriever" in name
            line = line[2:]
        if line[:1] == ["unspiral"]:
            assert line[1] == "serve"
            serving[name] = parse(click_app.commands["serve"].commands[line[2]], line[3:])
    assert serving.keys() == {"retriever", "retriever-second", "likelihood", "control"}
    for name, port in (("retriever", 8000), ("likelihood", 8100), ("control", 8200)):
        command = click_app.commands["serve"].commands[name]
        default = next(p.default for p in command.params if p.name == "port")
        assert serving[name]["port"] == default == port
        assert serving[name]["host"] == "0.0.0.0", (
            "inside the network; the host publishes it on loopback alone"
        )
    assert ServeSettings.model_fields["port"].default == 8100


def test_the_control_service_finds_runs_of_the_head_and_reaches_them(stack, monkeypatch):
    """The gateway asks the head's key-value store; a run's driver, on the head, must serve where the
    gateway's container can reach it."""
    line, head = words(stack["services"]["control"]), words(stack["services"]["ray-head"])
    asked = parse(typer.main.get_command(app).commands["serve"].commands["control"], line[3:])
    assert (
        asked["ray_address"]
        == f"ray-head:{next(w.removeprefix('--port=') for w in head if w.startswith('--port='))}"
    )
    Gateway(asked["ray_address"], None)
    drivers = stack["services"]["ray-head"]["environment"]
    for name in ("UNSPIRAL_CONTROL_HOST", "UNSPIRAL_API_TOKEN"):
        monkeypatch.setenv(name, drivers[name])
    settings = load_config(ROOT / "deploy/ray/demo.yaml").control
    assert settings.enabled and settings.host == "0.0.0.0"
    gate = stack["services"]["control"]["environment"]
    for name in ("UNSPIRAL_API_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        assert gate[name] == drivers[name], name
    passed_on = YAML(typ="safe").load((ROOT / "deploy/ray/runtime_env.yaml").read_text())["env_vars"]
    assert not passed_on.keys() & {"UNSPIRAL_CONTROL_HOST", "UNSPIRAL_API_TOKEN"}, (
        "they come from the head's own environment"
    )


def test_every_ray_command_is_one_that_ray_takes(stack):
    from ray.scripts.scripts import start

    for name in ("ray-head", "learner", "rollout", "learner-gpu", "rollout-gpu"):
        line = words(stack["services"][name])
        assert line[:2] == ["ray", "start"]
        asked = parse(start, line[2:])
        assert asked["block"] and asked["disable_usage_stats"] and asked["metrics_export_port"] == 8080
        if name == "ray-head":
            assert asked["head"] and asked["port"] == 6379 and asked["dashboard_port"] == 8265
            assert asked["num_cpus"] == 0, "neither learner nor workers land beside the drivers"
        else:
            assert asked["address"] == "ray-head:6379"
            assert json.loads(asked["resources"]) == {name.removesuffix("-gpu"): 1}


def test_node_resources_are_those_that_learner_and_pool_ask_for(stack):
    from services.rollout.pool.placement import RESOURCE, count, demand
    from services.settings import RolloutSettings
    from trainer.learner.group import LearnerGroup  # noqa: F401  (its demand is `learner` and one CPU)

    cluster = {"learner": 1.0, "rollout": 2.0, "CPU": 1.0}
    assert RESOURCE == "rollout"
    settings = RolloutSettings(workers="all")
    assert count(settings, cluster) == 2
    assert demand(settings, cluster) == {"rollout": 1}
    learner = words(stack["services"]["learner"])
    assert "--num-cpus=1" in learner and '--resources={"learner":1}' in learner


def test_the_job_and_the_index_are_started_by_scripts_that_take_their_arguments(stack, monkeypatch):
    job = words(stack["services"]["job"])
    assert job[:2] == ["python", "/app/deploy/ray/submit.py"]
    asked = load_script("deploy/ray/submit.py").arguments(job[2:])
    assert asked.command == "demo" and asked.wait_for == ["learner=1", "rollout=1"]
    index = words(stack["services"]["index"])
    assert index[:2] == ["python", "/app/deploy/docker/build_index.py"] and len(index) == 4
    served = words(stack["services"]["retriever"])
    assert served[served.index("--index") + 1] == index[3]


def test_another_corpus_takes_the_place_of_the_index_and_the_same_one_keeps_it(stack, tmp_path, monkeypatch):
    from retriever_service.index_folder.description import read_info

    script, folder = ROOT / "deploy/docker/build_index.py", tmp_path / "index"
    corpus = tmp_path / "corpus.jsonl"
    line = '{{"id": "0", "contents": "\\"{0}\\"\\n{0}"}}\n'.format
    monkeypatch.setattr(sys, "argv", [str(script), str(corpus), str(folder)])

    def index(text):
        """The exit status of the service's command, run in this process."""
        corpus.write_text(text)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return ended.value.code

    assert index(line("first")) == 0
    before = read_info(folder).corpus_sha256
    assert index(line("first")) == 0
    assert read_info(folder).corpus_sha256 == before
    assert index(line("second")) == 0
    assert read_info(folder).corpus_sha256 != before
    meta = folder / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 1}))
    assert index(line("second")) == 0
    assert read_info(folder).passages == 1, "an upgrade finds the last version's index"
    assert index("no corpus") == 2
    assert read_info(folder).passages == 1, "a bad corpus replaces nothing"
    restart = stack["services"]["retriever"]["depends_on"]["index"]["restart"]
    assert restart is True, "the retriever is started on the new one"


def test_ports_are_published_on_loopback_alone(stack):
    published = {
        (name, port["target"], port["host_ip"])
        for name, s in stack["services"].items()
        for port in s.get("ports", [])
    }
    assert published == {
        ("retriever", 8000, "127.0.0.1"),
        ("likelihood", 8100, "127.0.0.1"),
        ("control", 8200, "127.0.0.1"),
        ("ray-head", 8265, "127.0.0.1"),
        ("prometheus", 9090, "127.0.0.1"),
        ("grafana", 3000, "127.0.0.1"),
    }
    assert all("network_mode" not in s for s in stack["services"].values())


def test_health_checks_ask_routes_that_exist_at_the_port_served(stack, tmp_path):
    from retriever_service.http.server import create_app as retriever_app
    from retriever_service.settings import ServerSettings

    routes = {
        "retriever": {r.path for r in retriever_app(ServerSettings(index="none")).routes},
        "likelihood": {
            r.path for r in create_app(open_store(str(tmp_path / "s.db")), None, MonitorRules(), None).routes
        },
        "control": {r.path for r in control_app(Gateway("ray-head:6379", None)).routes},
    }
    for name, service in stack["services"].items():
        if name in ONE_SHOT:
            assert "healthcheck" not in service
            continue
        check = " ".join(service["healthcheck"]["test"])
        if name in routes:
            port, path = re.search(r"http://127.0.0.1:(\d+)(/\w+)", check).groups()
            assert f"--port {port}" in " ".join(words(service))
            assert path in routes[name]
    reporter = Path(importlib.util.find_spec("ray").origin).parent / "dashboard/modules/reporter"
    for file, name in (
        (reporter / "healthz_agent.py", "rollout"),
        (reporter / "reporter_head.py", "ray-head"),
    ):
        path = re.search(r"/api/\w+", " ".join(stack["services"][name]["healthcheck"]["test"]))[0]
        assert f'"{path}"' in file.read_text()


def test_the_second_retriever_answers_under_the_name_of_the_first(checkout, stack):
    """Both serve one index, which each opens anew by itself; one may stop while the other one answers."""
    first, second = stack["services"]["retriever"], stack["services"]["retriever-second"]
    apart = {"ports", "profiles", "networks"}
    assert {k: v for k, v in first.items() if k not in apart} == {
        k: v for k, v in second.items() if k not in apart
    }
    assert "retriever" in second["networks"]["internal"]["aliases"] and not second.get("ports")
    assert second["networks"].keys() == first["networks"].keys()
    assert "--reload-seconds" in words(first)
    for profiles, there in (((), False), (("--profile", "replicas"), True)):
        done = compose(checkout, *profiles, "config", "--services")
        assert ("retriever-second" in done.stdout.split()) is there, done.stderr


def test_dependencies_wait_for_health(stack):
    waits = {
        name: {d: c["condition"] for d, c in s.get("depends_on", {}).items()}
        for name, s in stack["services"].items()
    }
    assert waits["retriever"] == {"index": "service_completed_successfully"}
    assert waits["likelihood"] == {"redis": "service_healthy"}
    assert waits["learner"] == waits["rollout"] == waits["control"] == {"ray-head": "service_healthy"}
    assert waits["job"].keys() >= {"ray-head", "retriever", "likelihood"}
    assert {c for w in waits.values() for c in w.values()} == {
        "service_healthy",
        "service_completed_successfully",
    }


def test_no_container_asks_a_proxy_for_its_neighbours(stack):
    """Compose hands every container the proxy of ~/.docker/config.json, and urllib knows no 127.0.0.0/8 in
    `noProxy`."""
    proxied = {
        name: f"http://127.0.0.1:9/{name}"
        for s in ("http", "https", "all")
        for name in (f"{s}_proxy", f"{s}_proxy".upper())
    }
    for name, service in stack["services"].items():
        left = {k: v for k, v in (proxied | service["environment"]).items() if k in proxied and v}
        assert not left, f"{name} asks {left}"


def test_containers_are_confined_and_come_back(stack):
    for name, service in stack["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == ("no" if name in ONE_SHOT else "unless-stopped"), name
        assert name == "index" or int(service["deploy"]["resources"]["limits"]["memory"]) > 0, name
        assert service["logging"]["options"]["max-size"], name
        if not service["image"].startswith(OURS):
            assert not service["user"].startswith("0"), f"{name} runs as root"
    for dockerfile in (ROOT / "deploy/docker").glob("*.Dockerfile"):
        assert re.search(r"^USER 10001$", dockerfile.read_text(), re.M)


def test_volumes_are_named_and_their_folders_belong_to_the_images_user(stack):
    made = {
        image: set(
            re.search(
                r"install -d -o unspiral -g unspiral ([\w/ ]+)", (ROOT / f"deploy/docker/{file}").read_text()
            )[1].split()
        )
        for image, file in (("unspiral-node", "node.Dockerfile"), ("unspiral-", "service.Dockerfile"))
    }
    used = set()
    for name, service in stack["services"].items():
        writable = {v["target"]: v for v in service.get("volumes", []) if v["type"] == "volume"}
        used |= {v["source"] for v in writable.values()}
        if service["image"].startswith("unspiral-"):
            image = "unspiral-node" if service["image"].startswith("unspiral-node") else "unspiral-"
            assert writable.keys() <= made[image], f"{name}: a volume on another folder would belong to root"
        for bind in (v for v in service.get("volumes", []) if v["type"] == "bind"):
            assert bind["read_only"], f"{name} writes to {bind['source']}"
    assert used == stack["volumes"].keys()
    nodes = [stack["services"][n] for n in ("ray-head", "learner", "rollout", "learner-gpu", "rollout-gpu")]
    for target in ("/runs", "/cache"):
        assert all(any(v["target"] == target for v in n["volumes"]) for n in nodes), "shared by all nodes"


def test_variables_are_known_to_the_code(stack):
    sources = "".join(
        p.read_text()
        for room in ("trainer", "services", "retriever_service")
        for p in (ROOT / room).rglob("*.py")
    )
    ray = Path(importlib.util.find_spec("ray").origin).parent
    ray_text = "".join(
        (ray / f).read_text()
        for f in ("_private/authentication_test_utils.py", "_common/usage/usage_constants.py")
    )
    ray_text += (ray / "_private/ray_constants.py").read_text()
    for name, service in stack["services"].items():
        for variable in service.get("environment") or {}:
            if variable.startswith("UNSPIRAL_") and service["image"].startswith("unspiral-"):
                assert f'"{variable}"' in sources, f"{name}: {variable}"
            elif variable.startswith("RAY_") and variable != "RAY_ADDRESS":
                assert variable in ray_text, f"{name}: {variable}"
    for name in ("ray-head", "learner", "rollout", "control", "job"):
        assert stack["services"][name]["environment"]["RAY_AUTH_MODE"] == "token"
    for name in ("learner", "rollout", "retriever", "job"):
        assert "UNSPIRAL_API_TOKEN" not in (stack["services"][name].get("environment") or {}), (
            f"{name} has no use for it"
        )


def test_index_settings_are_build_arguments_that_no_image_keeps(stack):
    named = {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST", "UV_DEFAULT_INDEX"}
    for service in stack["services"].values():
        if "build" in service:
            text = (ROOT / service["build"]["dockerfile"]).read_text()
            first, last = text.split("\nFROM ")[1], text.split("\nFROM ")[-1]
            assert named <= set(re.findall(r"^ARG (\w+)", first, re.M))
            assert not named & set(re.findall(r"\w+", last))
            assert "--mount" not in text and "<<" not in text, "the classic builder knows neither"


def test_the_cluster_demo_differs_from_the_demo_only_where_it_says():
    here = load_config(ROOT / "examples/demo.yaml").model_dump(by_alias=True)
    there = load_config(ROOT / "deploy/ray/demo.yaml").model_dump(by_alias=True)
    different = set()

    def walk(a, b, at):
        for key in a.keys() | b.keys():
            if isinstance(a.get(key), dict) and isinstance(b.get(key), dict):
                walk(a[key], b[key], f"{at}{key}.")
            elif a.get(key) != b.get(key):
                different.add(f"{at}{key}")

    walk(here, there, "")
    assert different == {
        "run.dir",
        "retriever.corpus",
        "retriever.url",
        "rollout.workers",
        "store.url",
        "trainer.checkpoint_every",
    }
    text = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())
    assert there["retriever"]["url"].split("//")[1].split(":")[0] in text["services"]
    assert there["store"]["url"].split("//")[1].split(":")[0] in text["services"]


def test_the_build_context_holds_what_the_dockerfiles_copy_and_no_secret():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored, "everything that is not named stays out: .env, .git, runs"
    for dockerfile in (ROOT / "deploy/docker").glob("*.Dockerfile"):
        for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile.read_text(), re.M):
            for source in line.split()[:-1]:
                assert source in allowed, f"{dockerfile.name}: {source}"
                assert (ROOT / source).exists()


def test_the_manual_names_every_service_and_setting(stack):
    text = (ROOT / "docs/deploy.md").read_text()
    assert [
        name for name in stack["services"] if f"`{name}`" not in text and name.capitalize() not in text
    ] == []
    settings = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    example = (ROOT / ".env.example").read_text()
    assert [s for s in sorted(settings) if s not in text and s not in example] == []
