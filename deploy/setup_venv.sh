#!/usr/bin/env bash
# Make .venv with everything that the demo and the tests need, on a machine without a GPU.
#
#   deploy/setup_venv.sh            PYTHON=python3.12 chooses the interpreter, EXTRAS=cpu,dev installs less
#
# The images use it too, with VENV=/opt/venv and EDITABLE= (which copies the code instead of linking it).
# The CPU build of PyTorch comes from pip's configured sources (its index, PIP_FIND_LINKS, pip.conf), otherwise from
# PyTorch's own index.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==2.13.0+cpu"
TORCH_INDEX="https://download.pytorch.org/whl/cpu"
VENV=${VENV:-.venv}
EDITABLE=${EDITABLE-yes}
EXTRAS=${EXTRAS-cpu,models,dense,qdrant,redis,tensorboard,dev}

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 3; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
if [ ! -x "$VENV"/bin/python ]; then
  python=""
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    supported "$candidate" && python=$candidate && break
  done
  [ -n "$python" ] ||
    fail "Python 3.11, 3.12 or 3.13 is needed; looked for ${PYTHON:-python3, python3.11, python3.12, python3.13} on the PATH (set PYTHON=/path/to/python)"
  say "making $VENV with $("$python" --version)"
  made_here=$([ -e "$VENV" ] && echo no || echo yes)
  "$python" -m venv "$VENV" || {
    # Without ensurepip it leaves a venv without pip, which the next call would take for a good one.
    if [ "$made_here" = yes ]; then rm -rf "$VENV"; fi
    fail "python -m venv failed (on Debian: apt-get install python3-venv)"
  }
fi

need_mib=6000
[[ ",$EXTRAS," == *,cpu,* || ",$EXTRAS," == *,gpu,* ]] || need_mib=1500
free_mib=$(df -Pm "$VENV" | awk 'NR == 2 {print $4}')
[ "$free_mib" -ge "$need_mib" ] ||
  fail "$need_mib MiB of disk are needed for $VENV; $free_mib MiB are free here"

quiet=(--disable-pip-version-check --quiet)
# On a terminal pip and uv show what they download, and how far it is.
silent=(--quiet)
[ ! -t 2 ] || silent=()
"$VENV"/bin/python -m pip install "${quiet[@]}" uv ||
  fail "pip cannot install uv from its configured index: check the network, or pip's index-url"

if [[ ",$EXTRAS," == *,cpu,* ]] && ! "$VENV"/bin/python -c 'import torch' 2>/dev/null; then
  say "installing $TORCH (200 MB where it is downloaded)"
  torch=(-m pip install --disable-pip-version-check "${silent[@]}" --no-deps)
  # The first place mostly lacks this build: what pip says of it is kept, and told where the second one fails too.
  why=$(mktemp)
  trap 'rm -f "$why"' EXIT
  "$VENV"/bin/python "${torch[@]}" "$TORCH" 2>"$why" || {
    say "$TORCH is not where pip is configured to look; trying $TORCH_INDEX"
    "$VENV"/bin/python "${torch[@]}" --index-url "$TORCH_INDEX" --retries 1 --timeout 60 "$TORCH" || {
      sed 's/^/setup: where pip is configured to look: /' "$why" >&2
      fail "$TORCH for $("$VENV"/bin/python --version) was found neither where pip is configured to look (index${PIP_FIND_LINKS:+, PIP_FIND_LINKS=$PIP_FIND_LINKS}) nor at $TORCH_INDEX; pip's reasons are above"
    }
  }
fi

# uv reads neither pip.conf nor PIP_INDEX_URL, so it gets pip's index here.
index=${PIP_INDEX_URL:-$("$VENV"/bin/python -m pip config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
  export UV_DEFAULT_INDEX=$index
fi

say "installing unspiral[$EXTRAS] (a minute or so, longer with a download${silent:+; nothing is said meanwhile})"
"$VENV"/bin/uv pip install "${silent[@]}" --python "$VENV"/bin/python --overrides overrides.txt \
  ${EDITABLE:+--editable} ".[$EXTRAS]" ||
  fail "unspiral[$EXTRAS] could not be installed; uv's reason is above (its index: UV_DEFAULT_INDEX, else pip's, else PyPI)"
touch "$VENV/.ready"
say "done in $SECONDS s, $(du -sh "$VENV" | cut -f1) in $VENV; next: source $VENV/bin/activate, then unspiral doctor"
