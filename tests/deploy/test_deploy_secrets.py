"""The secrets of the stack: none is built in, and new ones are made in .env."""

import os
import re
import shutil
import subprocess

import pytest
from places import ROOT
from test_deploy_compose import checkout, compose  # noqa: F401

SECRETS = ("REDIS_PASSWORD", "UNSPIRAL_API_TOKEN", "RAY_AUTH_TOKEN", "GRAFANA_PASSWORD")


@pytest.mark.parametrize("secret", SECRETS)
def test_nothing_starts_without_a_secret(checkout, secret):
    env = {
        line.split("=")[0]: "x"
        for line in (checkout / ".env").read_text().splitlines()
        if "=" in line and line[0] != "#"
    }
    done = compose(checkout, "--env-file", "/dev/null", "config", "-q", env=env | {secret: ""})
    assert done.returncode != 0
    assert secret in done.stderr and "deploy/new_env.sh" in done.stderr


def test_new_secrets_are_long_different_and_readable_by_their_owner_alone(checkout):
    values = dict(
        line.split("=", 1)
        for line in (checkout / ".env").read_text().splitlines()
        if "=" in line and line[0] != "#"
    )
    assert len({values[s] for s in SECRETS}) == len(SECRETS)
    assert all(re.fullmatch(r"[0-9a-f]{48}", values[s]) for s in SECRETS)
    assert (checkout / ".env").stat().st_mode & 0o077 == 0
    example = (ROOT / ".env.example").read_text()
    assert all(f"\n{s}=\n" in example for s in SECRETS), "the example holds no secret"
    before = (checkout / ".env").read_text()
    subprocess.run([checkout / "deploy/new_env.sh"], check=True, capture_output=True, timeout=30)
    assert (checkout / ".env").read_text() == before, "a second call changes nothing"


def test_a_copy_of_the_example_gets_its_secrets_and_keeps_the_rest(tmp_path):
    """Compose sends everyone with an empty secret to this script."""
    (tmp_path / "deploy").mkdir()
    for name in (".env.example", "deploy/new_env.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    lines = [
        x for x in (ROOT / ".env.example").read_text().splitlines() if not x.startswith("GRAFANA_PASSWORD=")
    ]
    own = {"RAY_AUTH_TOKEN=": "RAY_AUTH_TOKEN=mine", "RETRIEVER_PORT=8000": "RETRIEVER_PORT=9000"}
    mine = [*(own.get(line, line) for line in lines), "HF_TOKEN="]  # a secret that is none of ours
    (tmp_path / ".env").write_text("\n".join(mine))
    done = subprocess.run(
        [tmp_path / "deploy/new_env.sh"], check=True, capture_output=True, text=True, timeout=30, umask=0o077
    )
    assert all((s in done.stdout) == (s != "RAY_AUTH_TOKEN") for s in SECRETS)
    after = (tmp_path / ".env").read_text().splitlines()
    assert {line.split("=")[0] for line in after if len(line.partition("=")[2]) == 48} == set(SECRETS) - {
        "RAY_AUTH_TOKEN"
    }
    assert [new for new, old in zip(after, mine, strict=False) if not old.startswith(SECRETS)] == [
        old for old in mine if not old.startswith(SECRETS)
    ]
    assert "RAY_AUTH_TOKEN=mine" in after
    folder = (tmp_path / "data").stat()
    assert folder.st_uid == os.getuid() and folder.st_mode & 0o755 == 0o755, "the engine would make it root's"
