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
NAME=oldest
. deploy/plain_install.sh

"$uv" venv --quiet --clear --python "$PYTHON" "$VENV"
pins=$VENV/oldest.txt
"$uv" pip compile --quiet --resolution lowest-direct --no-header --no-annotate \
  --python "$VENV"/bin/python -o "$pins" pyproject.toml >/dev/null
"$uv" pip install --quiet --python "$VENV"/bin/python -r "$pins" "${TOOLS[@]}"
named='^(fastapi|starlette|pydantic|uvicorn|httpx|numpy|typer)=='
say "$(grep -c '==' "$pins") packages, $(grep -E "$named" "$pins" | tr '\n' ' ')"

PYTHONPATH=$PWD exec "$VENV"/bin/python -m pytest -q -n 2 --dist loadfile \
  -m "not chaos and not browser and not ray and not vllm" "${files[@]}" "$@"
