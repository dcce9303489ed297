# Two commands matter: `make demo` and `make test`. Each sets up what it needs first.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# Half of the time of the tests is waiting, so that two a core keep both busy. WORKERS=0 runs them in order.
WORKERS ?= $(shell expr 2 \* $$(nproc))

# Tests of other commands: their peers are installed in environments of their own, or they take long (conftest.py).
QUICK := not nemo and not ray and not vllm and not llamacpp and not trainers and not frameworks and not harnesses and not thorough
PYTEST := $(PYTHON) -m pytest --reruns 2 -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-full test-thorough test-nemo test-ray test-vllm test-llamacpp test-cgroup2 test-trainers test-frameworks test-harnesses learn verify-swebench docs lint format bench faults fuzz coverage release lock clean help

help:
	@echo "make demo       set up, then run real rollouts end to end (ARGS='--help' shows the options)"
	@echo "make test       set up, then run the tests"
	@echo "make test-full  all other tests that this machine can run, part by part, with a table (ARGS=--list shows the parts)"
	@echo "make lint       formatter, linter and type checker; make format repairs what it can"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make bench      the performance tables, beside peers from PyPI (ARGS='--only bash --rounds 5')"
	@echo "make learn      a small model that learns, through the whole system, on the CPU (its own environments, 12 GB; ARGS='--seeds 1')"
	@echo "make fuzz       every parser of hostile input under a fuzzer (ARGS='--seconds 300 frames reports')"
	@echo "make faults     every fault on purpose, round after round (ARGS='--seconds 300 service_killed')"
	@echo "make coverage   the tests with coverage of subprocesses, as a table per package (ARGS='tests/tools')"
	@echo "make release    build, check and publish on the package index (ARGS=--no-upload: all but the last)"

demo:
	@scripts/setup.sh demo $(VENV)
	@$(VENV)/bin/prorl-envs demo $(ARGS)

test:
	@scripts/setup.sh test $(VENV)
	@$(PYTEST) -m "$(QUICK)" $(ARGS)

test-full:
	@scripts/setup.sh test $(VENV)
	@$(PYTHON) scripts/test_full.py $(ARGS)

# Parts of test-full.
test-thorough:
	@scripts/setup.sh test $(VENV)
	@TESTS_ON_DISK=1 $(PYTEST) -m thorough $(ARGS)

test-nemo:
	@scripts/test-nemo.sh $(ARGS)

test-ray:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) scripts/uv.sh pip install -e '.[ray]'
	@$(PYTHON) -m pytest -m ray -n 0 $(ARGS) tests/cli/test_ray.py tests/cli/test_slurm.py

test-vllm:
	@scripts/test-vllm.sh $(ARGS)

test-llamacpp:
	@scripts/test-llamacpp.sh $(ARGS)

test-cgroup2:
	@scripts/test-cgroup2.sh $(ARGS)

test-trainers:
	@scripts/test-trainers.sh $(ARGS)

test-frameworks:
	@scripts/test-frameworks.sh $(ARGS)

learn:
	@scripts/learn.sh $(ARGS)

test-harnesses:
	@scripts/setup.sh test $(VENV)
	@$(PYTHON) -m pytest -m harnesses -n 0 $(ARGS) tests/rollout/endpoint/test_recipes.py

verify-swebench:
	@scripts/setup.sh test $(VENV)
	@$(PYTHON) scripts/verify-swebench.py $(ARGS)

docs:
	@scripts/setup.sh demo $(VENV)
	@VENV=$(VENV) scripts/uv.sh pip install --group docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict $(ARGS)
	@echo "build/site/index.html"

lint:
	@scripts/setup.sh test $(VENV)
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

format:
	@scripts/setup.sh test $(VENV)
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench:
	@scripts/setup.sh test $(VENV)
	@scripts/setup-bench.sh $(VENV)
	@$(PYTHON) -m bench $(ARGS)

faults:
	@scripts/setup.sh test $(VENV)
	@$(PYTHON) -m faults $(ARGS)

fuzz:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) scripts/uv.sh pip install -e '.[fuzz]'
	@$(PYTHON) -m fuzz $(ARGS)

coverage:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) scripts/uv.sh pip install --group coverage
	@$(PYTHON) scripts/measure_coverage.py $(ARGS)

release:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) $(PYTHON) scripts/release.py $(ARGS)

lock:
	@scripts/setup.sh demo $(VENV)
	@VENV=$(VENV) scripts/uv.sh lock

clean:
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
