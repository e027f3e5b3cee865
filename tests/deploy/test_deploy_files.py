"""Dockerfiles, shell scripts, YAML and Kubernetes manifests under the linters and schemas of their kinds."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import typer
from places import ROOT
from ruamel.yaml import YAML

from retriever_service.settings import ServerSettings
from trainer.commands.cli import app

BIN = Path(sys.executable).parent
KUBERNETES = "1.31"


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def documents(text):
    return [d for d in YAML(typ="safe").load_all(text) if d]


@pytest.mark.parametrize("dockerfile", sorted(p.name for p in (ROOT / "deploy/docker").glob("*.Dockerfile")))
def test_hadolint_finds_nothing(dockerfile):
    done = run(BIN / "hadolint", f"deploy/docker/{dockerfile}")
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_shellcheck_finds_nothing():
    scripts = [p for folder in ("deploy", "tests") for p in sorted((ROOT / folder).rglob("*.sh"))]
    scripts += [ROOT / ".ci/run", *sorted((ROOT / "deploy").rglob("*.sbatch"))]
    done = run(BIN / "shellcheck", *scripts)
    assert done.returncode == 0, done.stdout


def test_yamllint_finds_nothing():
    done = run(BIN / "yamllint", "--strict", "docker-compose.yml", "deploy", "examples", "tests/compose")
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def overlay(request):
    done = run(BIN / "kubectl", "kustomize", f"deploy/kubernetes/overlays/{request.param}")
    assert done.returncode == 0, done.stderr
    return request.param, documents(done.stdout)


def of_kind(objects, kind):
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


def ray_pods(objects):
    spec = of_kind(objects, "RayCluster")["unspiral"]["spec"]
    return {"head": spec["headGroupSpec"]["template"]} | {
        g["groupName"]: g["template"] for g in spec["workerGroupSpecs"]
    }


def job():
    return documents((ROOT / "deploy/kubernetes/jobs/demo.yaml").read_text())[0]


def pods(objects):
    """Every pod template of the manifests by name."""
    plain = {
        n: o["spec"]["template"]
        for kind in ("Deployment", "StatefulSet")
        for n, o in of_kind(objects, kind).items()
    }
    return plain | ray_pods(objects) | {"submitter": job()["spec"]["submitterPodTemplate"]}


def test_core_objects_are_valid_to_the_letter(overlay):
    for thing in overlay[1]:
        assert thing["metadata"].get("namespace", "unspiral") == "unspiral"
        if not thing["apiVersion"].startswith("ray.io/"):
            kubernetes_validate.validate(thing, KUBERNETES, strict=True)


def test_pod_templates_of_ray_objects_are_valid_pods(overlay):
    templates = ray_pods(overlay[1]) | {"submitter": job()["spec"]["submitterPodTemplate"]}
    for name, template in templates.items():
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name} | template.get("metadata", {}),
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_a_misspelt_key_of_a_pod_would_be_found(overlay):
    spec = json.loads(json.dumps(ray_pods(overlay[1])["learner"]["spec"])) | {"securityContex": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec},
            KUBERNETES,
            strict=True,
        )


def test_pods_run_confined_with_probes_and_limits(overlay):
    for name, template in pods(overlay[1]).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0, name
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], name
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"], name
        if name != "submitter":
            assert all(c.get("readinessProbe") and c.get("livenessProbe") for c in spec["containers"]), name


def test_probes_have_the_time_that_health_checks_have(overlay):
    """Kubernetes gives one second: a pod that is only busy would be taken out of its service, and its load
    put on the next."""
    stack = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())
    patience = int(stack["services"]["retriever"]["healthcheck"]["timeout"].removesuffix("s"))
    probes = {
        f"{name} {kind}": container[kind].get("timeoutSeconds", 1)
        for name, template in pods(overlay[1]).items()
        for container in template["spec"]["containers"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        if kind in container
    }
    assert (
        len(probes) > 12 and {name: seconds for name, seconds in probes.items() if seconds < patience} == {}
    )


def test_learner_and_rollout_are_groups_of_their_own_and_rollout_scales_within_bounds(overlay):
    kind, objects = overlay
    cluster = of_kind(objects, "RayCluster")["unspiral"]["spec"]
    groups = {g["groupName"]: g for g in cluster["workerGroupSpecs"]}
    assert cluster["enableInTreeAutoscaling"] is True
    assert {n: json.loads(json.loads(g["rayStartParams"]["resources"])) for n, g in groups.items()} == {
        "learner": {"learner": 1},
        "rollout": {"rollout": 1},
    }
    assert groups["learner"]["minReplicas"] == groups["learner"]["maxReplicas"] == 1
    assert 1 <= groups["rollout"]["minReplicas"] < groups["rollout"]["maxReplicas"]
    for group in groups.values():
        container = group["template"]["spec"]["containers"][0]
        assert container["image"] == f"unspiral-node:{kind}"
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (kind == "gpu")
        assert group["rayStartParams"].get("num-gpus") == ("1" if kind == "gpu" else None)


def test_ray_start_takes_the_parameters_and_the_pinned_version(overlay):
    from ray.scripts.scripts import start

    cluster = of_kind(overlay[1], "RayCluster")["unspiral"]["spec"]
    pinned = next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "ray[default]==" in line
    )
    assert f"=={cluster['rayVersion']}" in pinned
    for params in [
        cluster["headGroupSpec"]["rayStartParams"],
        *(g["rayStartParams"] for g in cluster["workerGroupSpecs"]),
    ]:
        flags = [
            f"--{k}" if v == "true" else f"--{k}={json.loads(v) if v[0] == chr(34) else v}"
            for k, v in params.items()
        ]
        assert start.make_context("start", flags).params


def test_services_budgets_autoscaler_and_claims_point_at_what_is_there(overlay):
    objects = overlay[1]
    templates = pods(objects)
    labels = [t.get("metadata", {}).get("labels", {}) for t in templates.values()]
    for kind, where in (
        ("Service", lambda o: o["spec"]["selector"]),
        ("PodDisruptionBudget", lambda o: o["spec"]["selector"]["matchLabels"]),
    ):
        for name, thing in of_kind(objects, kind).items():
            assert any(where(thing).items() <= found.items() for found in labels), (
                f"{kind} {name} selects nothing"
            )
    autoscaler = of_kind(objects, "HorizontalPodAutoscaler")["retriever"]["spec"]
    assert autoscaler["scaleTargetRef"]["name"] in of_kind(objects, "Deployment")
    claims = of_kind(objects, "PersistentVolumeClaim").keys()
    for name, template in templates.items():
        for volume in template["spec"].get("volumes", []):
            assert (
                "persistentVolumeClaim" not in volume
                or volume["persistentVolumeClaim"]["claimName"] in claims
            ), name
    assert of_kind(objects, "RayCluster").keys() == {job()["spec"]["clusterSelector"]["ray.io/cluster"]}


def test_a_pod_of_the_retriever_answers_until_no_node_sends_it_connections(overlay):
    """A rollout then fails no request: the pod waits before it is told to stop, and has the time to drain."""
    deployment = of_kind(overlay[1], "Deployment")["retriever"]["spec"]
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    pod = deployment["template"]["spec"]
    word, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep" and shutil.which(word)
    drain = ServerSettings(index="i").drain_seconds
    assert int(seconds) > 0 and int(seconds) + drain < pod.get("terminationGracePeriodSeconds", 30)


def test_budgets_of_ray_pods_say_how_many_must_stay(overlay):
    """A RayCluster has no scale subresource: of `maxUnavailable` Kubernetes makes a budget that never lets
    any of its pods go."""
    ray = [t["metadata"]["labels"] for t in ray_pods(overlay[1]).values()]
    for name, budget in of_kind(overlay[1], "PodDisruptionBudget").items():
        if any(budget["spec"]["selector"]["matchLabels"].items() <= labels.items() for labels in ray):
            assert isinstance(budget["spec"].get("minAvailable"), int), name


def test_nothing_else_says_how_many_pods_an_autoscaler_wants(overlay):
    for scaler in of_kind(overlay[1], "HorizontalPodAutoscaler").values():
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in of_kind(overlay[1], target["kind"])[target["name"]]["spec"], (
            "a second `apply` would set it back"
        )


def test_the_operator_can_ask_how_a_job_goes(overlay):
    """It asks the dashboard from its own namespace, with the token of the Secret that KubeRay expects; else a
    RayJob never ends."""
    name, cluster = next(iter(of_kind(overlay[1], "RayCluster").items()))
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    head = ray_pods(overlay[1])["head"]
    token = next(v for v in head["spec"]["containers"][0]["env"] if v["name"] == "RAY_AUTH_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
    port = next(
        p["containerPort"] for p in head["spec"]["containers"][0]["ports"] if p["name"] == "dashboard"
    )
    let_in = [
        rule
        for policy in of_kind(overlay[1], "NetworkPolicy").values()
        if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= head["metadata"]["labels"].items()
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
        if "namespaceSelector" in peer
        and peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "kuberay-operator"
    ]
    assert [rule["ports"] for rule in let_in] == [[{"protocol": "TCP", "port": port}]]


def allowed(objects, pod, peer):
    """Ports of a pod that another pod of the namespace may reach; None stands for all."""

    def matches(selector, labels):
        terms = selector.get("matchExpressions", [])
        there = {"Exists": True, "DoesNotExist": False}
        return selector.get("matchLabels", {}).items() <= labels.items() and all(
            (term["key"] in labels) == there[term["operator"]] for term in terms
        )

    return {
        port.get("port")
        for policy in of_kind(objects, "NetworkPolicy").values()
        if matches(policy["spec"]["podSelector"], pod)
        for rule in policy["spec"]["ingress"]
        if any("namespaceSelector" not in p and matches(p["podSelector"], peer) for p in rule["from"])
        for port in rule.get("ports", [{}])
    }


def test_ray_nodes_are_reached_by_one_another_and_the_gateway_alone(overlay):
    objects = overlay[1]
    head, learner = (
        {"app.kubernetes.io/name": n, "ray.io/cluster": "unspiral"} for n in ("ray-head", "learner")
    )
    retriever, control, job = ({"app.kubernetes.io/name": n} for n in ("retriever", "control", "job"))
    assert allowed(objects, learner, head) == allowed(objects, learner, control) == {None}
    assert allowed(objects, head, control) >= {None}
    for stranger in (retriever, job, {"app.kubernetes.io/name": "redis"}):
        assert allowed(objects, learner, stranger) == set()
        assert allowed(objects, head, stranger) == {8265}
    assert allowed(objects, retriever, learner) == {None}


def test_the_manual_makes_the_secret_that_the_manifests_read(overlay):
    text = (ROOT / "docs/deploy.md").read_text()
    made = set(re.findall(r"--from-literal=([\w-]+)=", text))
    manifests = json.dumps(overlay[1]) + "".join(
        json.dumps(documents(f.read_text())) for f in (ROOT / "deploy/kubernetes/jobs").iterdir()
    )
    read = re.findall(r'"secretKeyRef": (\{[^}]*\})', manifests)
    assert {json.loads(ref)["name"] for ref in read} == {
        "unspiral"
    } and "create secret generic unspiral " in text
    assert {json.loads(ref)["key"] for ref in read} == made


def test_the_manuals_patch_serves_a_corpus_of_ones_own(overlay, tmp_path):
    text = (ROOT / "docs/deploy.md").read_text()
    (patch,) = re.findall(r"```yaml\n(patches:.*?)\n```", text, re.S)
    shutil.copytree(ROOT / "deploy/kubernetes", tmp_path / "k")
    with (tmp_path / f"k/overlays/{overlay[0]}/kustomization.yaml").open("a") as file:
        file.write(
            patch if overlay[0] == "cpu" else patch.removeprefix("patches:")
        )  # the GPU overlay has patches, last in its file
    done = run(BIN / "kubectl", "kustomize", tmp_path / f"k/overlays/{overlay[0]}")
    assert done.returncode == 0, done.stderr
    spec = of_kind(documents(done.stdout), "Deployment")["retriever"]["spec"]["template"]["spec"]
    index = spec["initContainers"][0]
    corpus = Path(index["args"][0])
    mount = next(m for m in index["volumeMounts"] if corpus.is_relative_to(m["mountPath"]))
    head = ray_pods(overlay[1])["head"]["spec"]["containers"][0]["volumeMounts"]
    assert f":{mount['mountPath']}/data`" in text and mount["name"] in {
        m["name"] for m in head if m["mountPath"] == mount["mountPath"]
    }


def test_rays_object_store_fits_into_shared_memory(overlay, monkeypatch):
    """Where it does not, Ray puts it on disk without a word that anybody sees."""
    from ray._private import utils

    for name, template in ray_pods(overlay[1]).items():
        shm = next(v["emptyDir"]["sizeLimit"] for v in template["spec"]["volumes"] if v["name"] == "shm")
        memory = template["spec"]["containers"][0]["resources"]["limits"]["memory"]
        room, limit = (int(size.removesuffix("Gi")) << 30 for size in (shm, memory))
        monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda room=room: room)
        assert utils.resolve_object_store_memory(limit) <= room, name


def test_container_commands_are_those_of_the_compose_file(overlay):
    services = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())["services"]
    deployments = of_kind(overlay[1], "Deployment")
    for name in ("retriever", "likelihood", "control"):
        args = deployments[name]["spec"]["template"]["spec"]["containers"][0]["args"]
        assert [a.replace("unspiral-head-svc:", "ray-head:") for a in args] == services[name]["command"]
    redis = of_kind(overlay[1], "StatefulSet")["redis"]["spec"]["template"]["spec"]["containers"][0]
    assert redis["args"][0].replace("$", "$$") == services["redis"]["command"][2]
    assert redis["image"] == services["redis"]["image"]


@pytest.mark.parametrize(
    ("file", "limit", "bound"),
    [
        ("memory.max", "1073741824\n", 751619274),
        ("memory.max", "max\n", 0),
        ("memory/memory.limit_in_bytes", "2147483648\n", 1503238548),
        (None, "", 0),
    ],
    ids=["version 2", "no limit", "version 1", "no cgroup"],
)
def test_redis_refuses_records_before_its_container_is_ended_for_memory(file, limit, bound, tmp_path):
    services = YAML(typ="safe").load((ROOT / "docker-compose.yml").read_text())["services"]
    line, start = services["redis"]["command"][2].replace("$$", "$"), "exec redis-server /tmp/redis.conf"
    assert start in line and "--maxmemory-policy noeviction" in line
    (tmp_path / "memory").mkdir()
    if file:
        (tmp_path / file).write_text(limit)
    line = (
        line[: line.index(start)]
        .replace("/sys/fs/cgroup", str(tmp_path))
        .replace("/tmp/redis.conf", f"{tmp_path}/redis.conf")
    )
    environment = {"PATH": os.environ["PATH"], "REDIS_PASSWORD": "secret"}
    subprocess.run(["sh", "-c", f"{line} true"], env=environment, check=True, timeout=60)
    assert (tmp_path / "redis.conf").read_text() == f"requirepass secret\nmaxmemory {bound}\n"


def test_runs_of_the_cluster_are_reached_by_the_control_service(overlay):
    """KubeRay calls the head's service NAME-head-svc; drivers run on the head."""
    cluster = next(iter(of_kind(overlay[1], "RayCluster")))
    control = of_kind(overlay[1], "Deployment")["control"]["spec"]["template"]["spec"]["containers"][0]
    assert f"{cluster}-head-svc:6379" in control["args"]
    head = {v["name"]: v for v in pods(overlay[1])["head"]["spec"]["containers"][0]["env"]}
    assert head["UNSPIRAL_CONTROL_HOST"]["value"] == "0.0.0.0"
    for name in ("UNSPIRAL_API_TOKEN", "RAY_AUTH_TOKEN"):
        assert head[name] in control["env"], f"the same {name} on both sides"
    ports = {name: s["spec"]["ports"][0]["port"] for name, s in of_kind(overlay[1], "Service").items()}
    assert ports == {"retriever": 8000, "likelihood": 8100, "control": 8200, "redis": 6379}


def test_no_secret_lies_in_the_manifests(overlay):
    secrets = {"REDIS_PASSWORD", "UNSPIRAL_API_TOKEN", "RAY_AUTH_TOKEN"}
    assert not of_kind(overlay[1], "Secret")
    for name, template in pods(overlay[1]).items():
        for container in template["spec"]["containers"]:
            for variable in container.get("env", []):
                assert variable["name"] not in secrets or "secretKeyRef" in variable["valueFrom"], name


def test_the_plain_job_runs_the_client_that_resumes(overlay):
    thing = documents((ROOT / "deploy/kubernetes/jobs/resuming.yaml").read_text())[0]
    kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    container = thing["spec"]["template"]["spec"]["containers"][0]
    script = importlib.util.spec_from_file_location(
        "submit", ROOT / container["command"][1].removeprefix("/app/")
    )
    submit = importlib.util.module_from_spec(script)
    script.loader.exec_module(submit)
    asked = submit.arguments(container["args"])
    cluster = next(iter(of_kind(overlay[1], "RayCluster")))
    assert asked.address == f"http://{cluster}-head-svc:8265", "KubeRay's name for the head's service"
    line = submit.training(asked.command, asked.rest, again=True, stamp="x")
    assert line[3:] == ["train", "--config=/app/deploy/ray/demo.yaml", "run.name=demo", "--resume=latest"]


def test_the_rayjob_goes_on_where_it_was():
    spec = job()["spec"]
    words = spec["entrypoint"].split()
    assert words[:4] == ["python", "-m", "trainer", "train"]
    assert words[-2:] == ["--resume", "latest"]
    assert spec["submitterConfig"]["backoffLimit"] >= 1
    same = YAML(typ="safe").load((ROOT / "deploy/ray/runtime_env.yaml").read_text())["env_vars"]
    assert YAML(typ="safe").load(spec["runtimeEnvYAML"])["env_vars"] == same


def test_the_container_of_the_readme_fits_its_dockerfile():
    """Its image is the one that the line before builds, its volumes are folders that the image's user owns,
    and its command is one of ours."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (build,), (start,) = (
        [shlex.split(line) for line in re.findall(rf"^docker {what} .*", text, re.M)]
        for what in ("build", "run")
    )
    file = (ROOT / build[build.index("-f") + 1]).read_text(encoding="utf-8")
    image = build[build.index("-t") + 1]
    words = start[start.index(image) + 1 :]
    assert build[-1] == "." and words[0] == "unspiral" and "ENTRYPOINT" not in file
    owned = re.search(r"install -d -o unspiral -g unspiral (.*)", file)[1].split()
    mounted = [word.split(":") for flag, word in pairwise(start) if flag == "-v"]
    assert {target for _, target in mounted} <= set(owned) and not any("/" in name for name, _ in mounted)
    assert "/cache" in owned and "UNSPIRAL_CACHE=/cache" in file
    assert words[words.index("--dir") + 1] == "/runs"
    command = typer.main.get_command(app).commands[words[1]]
    command.make_context(words[1], words[2:])
