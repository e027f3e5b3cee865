# shellcheck shell=bash
# shellcheck disable=SC2034  # TOOLS and files are for the script that reads this
# Sourced by deploy/test_oldest.sh and deploy/test_pythons.sh, after NAME and PYTHON are set: what the tests of
# a plain install need, and which files they are.

# What the tests themselves need: their own versions are not what is tested.
TOOLS=(
  bm25s==0.3.16 fakeredis hypothesis pandas playwright redis schemathesis
  "pytest>=9,<10" pytest-asyncio pytest-timeout pytest-xdist
)

say() { echo "$NAME: $*"; }
fail() { echo "$NAME: $*" >&2; exit 3; }
uv=$(dirname "$PYTHON")/uv
[ -x "$uv" ] || fail "$uv is missing: make setup brings it"

index=${PIP_INDEX_URL:-$("$PYTHON" -m pip config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
  export UV_DEFAULT_INDEX=$index
fi

# Files that import what a plain install lacks are left out; those that only skip without it are not.
mapfile -t files < <(grep -LE '^(import|from) (ray|torch|transformers|vllm)\b' \
  tests/retriever/test_retriever_*.py tests/{likelihood,monitor,pages}/test_likelihood_*.py \
  tests/commands/test_cli*.py tests/config/test_config.py \
  tests/questions/test_data_*.py tests/common/test_{extras,gate}*.py tests/docs/test_house.py)
