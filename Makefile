# make setup   .venv with everything (CPU)          make demo    watch a search agent learn
# make check   lint and the fast half of the tests     make study   GRPO without and with LLDS, side by side
# make test    the whole test suite                    make docs    the pages as a site, in build/site
# make study-full    the whole collapse study, resumable: 180 runs (a day and more; benchmarks/collapse/PLAN.md)
# make test-oldest   the plain install's tests with the lowest allowed versions (4 minutes)
# make test-pythons  which versions of Python the stack allows: resolved on the package index, the plain install tested
# make test-adapters  unspiral-health from its wheel, and its adapters on TRL, verl, OpenRLHF and SkyRL (10 minutes)
# make test-compose  builds, uses and breaks the stack of docker-compose.yml (21 minutes; docs/deploy.md)
# make test-hosts    hosts as network namespaces; two are cut off for 30 s (7 minutes, root)
# make test-chaos    runs in which every part is broken on purpose (over an hour; docs/reliability.md)
.PHONY: setup demo check test test-oldest test-pythons test-adapters test-chaos test-compose test-hosts study study-full docs lint clean
PY := .venv/bin/python

setup: .venv/.ready

.venv/.ready: pyproject.toml overrides.txt deploy/setup_venv.sh
	@deploy/setup_venv.sh

demo: setup
	$(PY) -m trainer demo

study: setup
	$(PY) -m trainer demo --collapse

# Part of it: STUDY_ARMS=factorial make study-full; STUDY_ARMS=second has the arms of PLAN_SECOND.md. It goes on where it was stopped.
# STUDY_ARMS=corners STUDY_SEEDS=100:103 make study-full: two rates x lambda 0 and .5, three seeds, 12 runs of 3 to 15 minutes, two at a time.
STUDY_ARMS ?= all
STUDY_SEEDS ?= 100:110
STUDY_FOLDER ?= runs/collapse
STUDY_PARALLEL ?= 2
study-full: setup
	$(PY) -m benchmarks.collapse grid --folder $(STUDY_FOLDER) --arms $(STUDY_ARMS) --seeds $(STUDY_SEEDS) --parallel $(STUDY_PARALLEL)
	$(PY) -m benchmarks.collapse collect --folder $(STUDY_FOLDER) --arms $(STUDY_ARMS) --seeds $(STUDY_SEEDS)
	$(PY) -m benchmarks.collapse tables

# Lint, and the tests that start no engine, cluster or browser and take less than four seconds or so each.
check: setup lint
	$(PY) -m pytest -n 3 --dist loadfile -m "not chaos and not ray and not vllm and not browser and not slow"

test: setup lint
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-oldest: setup
	deploy/test_oldest.sh

test-pythons: setup
	deploy/test_pythons.sh

# ADAPTERS_VENV keeps the environment for the next run (4 GB).
test-adapters: setup
	deploy/test_adapters.sh

# A shorter run: CHAOS_STEPS=40 CHAOS_KILLS=5 make test-chaos; another seed: CHAOS_SEED=1.
test-chaos: setup
	$(PY) -m pytest -m chaos -s tests

# COMPOSE_WORK keeps images and build layers for the next run (15 GB). STACK="small demo" runs only these parts.
COMPOSE_WORK ?= /var/tmp/unspiral-compose
STACK ?= small demo scale chaos replicas
test-compose: setup
	@PYTHON=$(abspath $(PY)) tests/compose/engine.sh $(COMPOSE_WORK) \
	  sh -ec 'for part in $(STACK); do \
	    $(abspath $(PY)) tests/compose/check_stack.py $(COMPOSE_WORK) $$part; done'

test-hosts: setup
	$(abspath $(PY)) tests/compose/namespaces.py /var/tmp/unspiral-hosts

docs: setup
	$(PY) -m mkdocs build --strict

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-cache
	.venv/bin/mypy

clean:
	rm -rf .venv .venv-oldest .venv-adapters build *.egg-info
