#!/usr/bin/env bash
# Tests the services of a plain install (retriever, likelihood, command line) with the lowest
# versions that pyproject.toml allows.
#
#   deploy/test_oldest.sh [pytest's arguments]
#
# VENV is the folder of the environment (.venv-oldest); PYTHON an interpreter beside which uv lies (.venv/bin/python).
# Raise a floor in pyproject.toml where a test fails here and passes with new versions. torch, Ray and vLLM
# stay out: their versions are pinned.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv-oldest}
PYTHON=${PYTHON:-.venv/bin/python}
# What the tests themselves need: their own versions are not what is tested.
TOOLS=(
  bm25s==0.3.16 fakeredis hypothesis pandas playwright redis schemathesis
  "pytest>=9,<10" pytest-asyncio pytest-timeout pytest-xdist
)

say() { echo "oldest: $*"; }
fail() { echo "oldest: $*" >&2; exit 3; }
uv=$(dirname "$PYTHON")/uv
[ -x "$uv" ] || fail "$uv is missing: make setup brings it"

index=${PIP_INDEX_URL:-$("$PYTHON" -m pip config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
  export UV_DEFAULT_INDEX=$index
fi

"$uv" venv --quiet --clear --python "$PYTHON" "$VENV"
pins=$VENV/oldest.txt
"$uv" pip compile --quiet --resolution lowest-direct --no-header --no-annotate \
  --python "$VENV"/bin/python -o "$pins" pyproject.toml >/dev/null
"$uv" pip install --quiet --python "$VENV"/bin/python -r "$pins" "${TOOLS[@]}"
named='^(fastapi|starlette|pydantic|uvicorn|httpx|numpy|typer)=='
say "$(grep -c '==' "$pins") packages, $(grep -E "$named" "$pins" | tr '\n' ' ')"

# Files that import what a plain install lacks are left out; those that only skip without it are not.
mapfile -t files < <(grep -LE '^(import|from) (ray|torch|transformers|vllm)\b' \
  tests/retriever/test_retriever_*.py tests/{likelihood,monitor,pages}/test_likelihood_*.py \
  tests/commands/test_cli*.py tests/config/test_config.py \
  tests/questions/test_data_*.py tests/common/test_{extras,gate}*.py tests/docs/test_house.py)
PYTHONPATH=$PWD exec "$VENV"/bin/python -m pytest -q -n 2 --dist loadfile \
  -m "not chaos and not browser and not ray and not vllm" "${files[@]}" "$@"
