# make setup   .venv with everything (CPU)          make demo    watch a search agent learn
# make test    the test suite                       make study   GRPO without and with LLDS, side by side
.PHONY: setup demo test study lint clean
PY := .venv/bin/python

setup: .venv/.ready

.venv/.ready: pyproject.toml overrides.txt deploy/setup_venv.sh
	@deploy/setup_venv.sh

demo: setup
	$(PY) -m trainer demo

study: setup
	$(PY) -m trainer demo --collapse

test: setup lint
	$(PY) -m pytest -n 2 --dist loadfile

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

clean:
	rm -rf .venv build *.egg-info
