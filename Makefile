# Two commands matter: `make demo` and `make test`. Each sets up what it needs first.
VENV ?= .venv
PYTHON := $(VENV)/bin/python
# Half of the time of the tests is waiting, so that two a core keep both busy. WORKERS=0 runs them in order.
WORKERS ?= $(shell expr 2 \* $$(nproc))

.PHONY: demo test test-thorough test-nemo test-ray test-vllm test-llamacpp test-cgroup2 test-trainers test-harnesses learn verify-swebench docs lint format bench faults fuzz mutation coverage release lock clean help

help:
	@echo "make demo       set up, then run real rollouts end to end (ARGS='--help' shows the options)"
	@echo "make test       set up, then run the tests"
	@echo "make test-thorough  those that take longest, which make test leaves out"
	@echo "make test-nemo  the tests against a real NeMo Gym (its own environment, several minutes; NEMO_GYM=0.7 for another than 0.4)"
	@echo "make verify-swebench  reference, empty patch and cheats on every SWE-bench instance (ARGS='tasks.parquet')"
	@echo "make test-ray   nodes as actors on a Ray cluster of several Ray nodes (a minute; adds the extra)"
	@echo "make test-vllm  the model client against a real vLLM on the CPU (its own environment, 6 GB, several minutes)"
	@echo "make test-llamacpp  the model client against a real llama.cpp server (its own environment, 200 MB, a minute)"
	@echo "make test-cgroup2  limits kept by delegated control groups, in a virtual machine (Debian with QEMU and systemd, 500 MB)"
	@echo "make test-trainers  every adapter against its trainer's package (ARGS='trl verl'; environments of 1 to 6 GB)"
	@echo "make learn      a small model that learns, through the whole system, on the CPU (its own environments, 12 GB; ARGS='--seeds 1')"
	@echo "make test-harnesses  each known harness, unmodified, on tasks in sandboxes (PyPI, npm, 2 GB in the cache, some minutes)"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make lint       formatter, linter and type checker; make format mends what it can"
	@echo "make fuzz       every parser of hostile input under a fuzzer (ARGS='--seconds 300 frames reports')"
	@echo "make faults     every fault on purpose, round after round (ARGS='--seconds 300 service_killed')"
	@echo "make mutation   mutation tests of the pure core (ARGS='--sample 300 --seed x --only "prorl_envs/model/*"')"
	@echo "make coverage   the tests with coverage of subprocesses, as a table per package (ARGS='tests/tools')"
	@echo "make release    build, check and publish on the package index (ARGS=--no-upload: all but the last)"
	@echo "make bench      the performance tables, beside peers from PyPI (ARGS='--only bash --rounds 5')"

demo:
	@scripts/setup.sh demo $(VENV)
	@$(VENV)/bin/prorl-envs demo $(ARGS)

test:
	@scripts/setup.sh test $(VENV)
	@$(PYTHON) -m pytest -m "not nemo and not ray and not vllm and not llamacpp and not trainers and not harnesses and not thorough" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-thorough:
	@scripts/setup.sh test $(VENV)
	@TESTS_ON_DISK=1 $(PYTHON) -m pytest -m "thorough" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-nemo:
	@scripts/test-nemo.sh $(ARGS)

test-ray:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) scripts/uv.sh pip install -e '.[ray]'
	@$(PYTHON) -m pytest -m ray -n 0 $(ARGS) tests/cli/test_ray.py

test-vllm:
	@scripts/test-vllm.sh $(ARGS)

test-llamacpp:
	@scripts/test-llamacpp.sh $(ARGS)

test-cgroup2:
	@scripts/test-cgroup2.sh $(ARGS)

test-trainers:
	@scripts/test-trainers.sh $(ARGS)

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
	@echo "tests that may run twice:"; grep -rnE "mark\.flaky\(" tests envs --include=*.py --exclude=test_reports.py || echo "  none"

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

mutation:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) scripts/uv.sh pip install --group mutation
	@$(PYTHON) scripts/mutation.py $(ARGS)

coverage:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) scripts/uv.sh pip install --group mutation
	@$(PYTHON) scripts/measure_coverage.py $(ARGS)

release:
	@scripts/setup.sh test $(VENV)
	@VENV=$(VENV) $(PYTHON) scripts/release.py $(ARGS)

lock:
	@scripts/setup.sh demo $(VENV)
	@VENV=$(VENV) scripts/uv.sh lock

clean:
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
