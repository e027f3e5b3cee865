# make setup   .venv with everything (CPU)          make demo    watch a search agent learn
# make check   lint and the fast half of the tests     make study   GRPO without and with LLDS, side by side
# make test    the whole test suite                    make docs    the pages as a site, in build/site
# make study-full    the whole collapse study, resumable: 180 runs (a day and more; benchmarks/collapse/PLAN.md)
# make test-oldest   the plain install's tests with the lowest versions that pyproject.toml allows (2 minutes)
# make test-compose   the stack of docker-compose.yml: built, used, broken in every way (21 minutes; docs/deploy.md)
# make test-hosts     hosts as network namespaces, without containers; two are cut off for 30 s (7 minutes, root)
# make test-chaos     runs in which everything is broken on purpose (an hour and more; docs/reliability.md)
.PHONY: setup demo check test test-oldest test-chaos test-compose test-hosts study study-full docs lint clean
PY := .venv/bin/python

setup: .venv/.ready

.venv/.ready: pyproject.toml overrides.txt deploy/setup_venv.sh
	@deploy/setup_venv.sh

demo: setup
	$(PY) -m trainer demo

study: setup
	$(PY) -m trainer demo --collapse

# Part of it: STUDY_ARMS=factorial make study-full. It goes on where it was stopped.
STUDY_ARMS ?= all
STUDY_FOLDER ?= runs/collapse
study-full: setup
	$(PY) -m benchmarks.collapse grid --folder $(STUDY_FOLDER) --arms $(STUDY_ARMS)
	$(PY) -m benchmarks.collapse collect --folder $(STUDY_FOLDER) --arms $(STUDY_ARMS)
	$(PY) -m benchmarks.collapse tables

# Lint and the half of the tests that starts no engine, cluster or browser.
check: setup lint
	$(PY) -m pytest -n 2 --dist loadfile -m "not chaos and not ray and not vllm and not browser"

test: setup lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-oldest: setup
	deploy/test_oldest.sh

# Less of it: CHAOS_STEPS=40 CHAOS_KILLS=5 make test-chaos; another seed: CHAOS_SEED=1.
test-chaos: setup
	$(PY) -m pytest -m chaos -s tests

# What it keeps for the next time (images and build layers, 15 GB) lies in COMPOSE_WORK; leave out parts with STACK="small demo".
COMPOSE_WORK ?= /var/tmp/unspiral-compose
STACK ?= small demo scale chaos
test-compose: setup
	@PYTHON=$(abspath $(PY)) tests/compose/engine.sh $(COMPOSE_WORK) \
	  sh -ec 'for part in $(STACK); do $(abspath $(PY)) tests/compose/check_stack.py $(COMPOSE_WORK) $$part; done'

test-hosts: setup
	$(abspath $(PY)) tests/compose/namespaces.py /var/tmp/unspiral-hosts

docs: setup
	$(PY) -m mkdocs build --strict

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-cache

clean:
	rm -rf .venv .venv-oldest build *.egg-info
