#!/usr/bin/env bash
# Tests unspiral-health where it will live: its wheel in empty environments, and its adapters beside the trainers.
#
#   deploy/test_adapters.sh [pytest's arguments]
#
# ADAPTERS_VENV is the folder of the trainers' environment (.venv-adapters); it is kept. PYTHONS are interpreters in
# whose empty environments the wheel is installed (python3.11 and python3.12, where they are found). The trainers come
# without their dependencies, as each pins its own transformers and Ray, and some want CUDA; what their tested modules
# import is installed beside them.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${ADAPTERS_VENV:-.venv-adapters}
PYTHON=${PYTHON:-.venv/bin/python}
PYTHONS=${PYTHONS:-python3.11 python3.12}
TRAINERS=(verl==0.9.1 openrlhf==0.11.2 skyrl==0.3.0 skyrl-gym TransferQueue)
BESIDE=(
  accelerate aiohttp cachetools cloudpickle codetiming deepspeed==0.19.8 hydra-core jaxtyping loguru omegaconf pandas
  peft pillow pylatexenc "ray==2.60.0" tensordict torchdata
)
# With TRL's copies of the makers' chat templates they show what a model is shown.
VOCABULARIES=(dashscope==2.0.2 llama-models==0.3.0)
TOOLS=(hypothesis "pytest>=9,<10" pytest-asyncio pytest-timeout pytest-xdist "setuptools>=77")

unset PYTHONPATH  # of a caller whose tree would count as installed
say() { echo "adapters: $*"; }
fail() { echo "adapters: $*" >&2; exit 3; }

PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd packages/health && "$PYTHON" -c "import collect; collect.build_wheel('$work')") >/dev/null
wheel=("$work"/unspiral_health-*.whl)
say "$(basename "${wheel[0]}"), $(($(stat -c %s "${wheel[0]}") / 1000)) kB"

for python in $PYTHONS; do
  "$python" --version >/dev/null 2>&1 || { say "$python: not found"; continue; }
  "$python" -m venv "$work/$python"
  began=$(date +%s%N)
  "$work/$python"/bin/python -m pip install --disable-pip-version-check --quiet "${wheel[0]}"
  took=$((($(date +%s%N) - began) / 100000000))
  say "$("$python" --version): installed in $((took / 10)).$((took % 10)) s with" \
    "$("$work/$python"/bin/python -m pip list --format=freeze 2>/dev/null | grep -vcE '^(pip|setuptools)==') packages"
  UNSPIRAL_HEALTH_PYTHON="$work/$python/bin/python" "$PYTHON" -m pytest -q tests/health/test_health_wheel.py -k strangers
done

if [ ! -e "$VENV/.ready" ]; then
  "$PYTHON" -m venv --clear "$VENV"
  pip=("$VENV"/bin/python -m pip install --disable-pip-version-check --quiet)
  "${pip[@]}" "torch==2.13.0+cpu" || "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu" ||
    fail "torch==2.13.0+cpu was found neither where pip is configured to look nor at PyTorch's index"
  "${pip[@]}" trl==1.16.0 "${BESIDE[@]}" "${VOCABULARIES[@]}" "${TOOLS[@]}"
  "${pip[@]}" --no-deps "${TRAINERS[@]}"
  "${pip[@]}" -e .
  # verl's wheel brings a package `tests`, which would hide ours.
  rm -rf "$VENV"/lib/python*/site-packages/tests
  touch "$VENV/.ready"
fi
say "$("$VENV"/bin/python -m pip list --format=freeze 2>/dev/null |
  grep -iE '^(trl|verl|openrlhf|skyrl|torch|transformers)==' | tr '\n' ' ')"
UNSPIRAL_REAL_TRAINERS=1 PYTHONPATH=$PWD OMP_NUM_THREADS=1 exec "$VENV"/bin/python -m pytest -q -rs \
  tests/health/test_health_*.py tests/likelihood/test_likelihood_padded.py \
  tests/rollout/test_rollout_thoughts.py "$@"
