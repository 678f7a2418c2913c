# make demo    everything from an empty machine to the report of a survived kill (out/demo/report.html)
# make test    the whole test suite, in the same environment
# make check   the tests that neither start whole jobs nor simulate them, nor end a process at each point of its work:
#              two minutes on 2 cores
# make test-torch TORCH=2.4.1   a small set of tests with another torch, in an environment of its own
# make lint    ruff and mypy
# make browser the page of a job in Debian's chromium, with axe-core
# make monitoring   a killed rank through Debian's Prometheus and Alertmanager to a webhook
# make docs    the pages of this repository as a site, out/site/html/index.html; a link that leads nowhere is an error
# make clean   what was built and written; make distclean also the environment and the downloads
#
# PYTHON picks the interpreter of the environment (3.10 to 3.13), TORCH the version of torch,
# DEMO options for the demo (make demo DEMO="--kill-rank 0"), TESTS for pytest (make test TESTS="-k plan"),
# JOBS how many tests run at the same time (three for each core).

PYTHON ?= python3
TORCH ?= 2.13.0
DEMO ?=
TESTS ?=
# What depends on torch: the launcher, the patches, last words after a kill, a restart.
SMALL ?= tests/unit/test_ttprun*.py tests/unit/test_checkpoint_dump.py tests/patches tests/integration/test_phases.py
JOBS ?=

VENV := .venv
BIN := $(abspath $(VENV)/bin)
LOG := $(VENV)/install.log
VENV_READY := $(VENV)/.created
TORCH_READY := $(VENV)/.torch-$(TORCH)
PROJECT_READY := $(VENV)/.project-torch-$(TORCH)
FRAMEWORKS_READY := .cache/frameworks/.prepared

export PATH := $(BIN):$(PATH)
# The tests start thousands of processes: without bytecode each compiles the project and the framework again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-torch check gpu lint browser monitoring docs clean distclean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(PROJECT_READY) $(FRAMEWORKS_READY)
	@$(BIN)/python -m demo $(DEMO)

# A worker begins with its share of the long tests, then of the others (tests/forked_workers.py), so most tests that
# share a fixture run in one place, and then takes what others have left.
# More run at the same time than there are cores, since many tests wait most of the time.
pytest = $(BIN)/python -m pytest -n $(or $(JOBS),$(shell expr $$(nproc) \* 3)) --dist worksteal

test: $(PROJECT_READY) $(FRAMEWORKS_READY)
	@$(pytest) $(TESTS)

check: $(PROJECT_READY) $(FRAMEWORKS_READY)
	@$(pytest) -m 'not integration' --ignore tests/simulation --ignore tests/integration $(TESTS)

test-torch:
	@$(MAKE) --no-print-directory test VENV=.venv-torch-$(TORCH) TORCH=$(TORCH) TESTS="$(SMALL) $(TESTS)"

# One GPU, nine minutes at most: docs/accelerators.md.
gpu: $(PROJECT_READY) $(FRAMEWORKS_READY)
	@$(BIN)/python -m tests.device.gpu.measure $(GPU)

lint: $(PROJECT_READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

browser: $(PROJECT_READY)
	@$(call need,command -v chromium,there is no chromium (Debian: apt-get install chromium))
	@$(call logged,installing playwright and axe-core,$(BIN)/pip install -c $(VENV)/constraints.txt -e '.[browser]')
	@$(BIN)/python -m pytest tests/unit/test_page_in_chromium.py $(TESTS)

monitoring: $(PROJECT_READY) $(FRAMEWORKS_READY)
	@$(BIN)/python -m tests.integration.monitoring

docs: $(PROJECT_READY)
	@$(call logged,installing mkdocs,$(BIN)/pip install -c $(VENV)/constraints.txt -e '.[site]')
	@rm -rf out/site
	@mkdir -p out/site/pages
	@git ls-files '*.md' 'docs/*.svg' 'docs/*.css' | grep -v -e '^tests/' -e '^benchmarks/results/' | xargs cp --parents -t out/site/pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site: out/site/html/index.html"

# One line instead of a traceback for whatever the machine lacks. $(1): the test, $(2): what to say.
need = $(1) >/dev/null 2>&1 || { echo "make: $(2)" >&2; exit 1; }
# Runs $(2), named $(1) to the user, with its output in the log.
logged = echo "$(1)"; { $(2); } >>$(LOG) 2>&1 || { echo "make: failed: $(1); see $(LOG)" >&2; exit 1; }

$(VENV_READY):
	@$(call need,command -v $(PYTHON),no interpreter '$(PYTHON)': install CPython 3.10 to 3.13 or say make PYTHON=...)
	@$(call need,$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))','$(PYTHON)' is $$($(PYTHON) -V 2>&1): CPython 3.10 to 3.13 is needed; say make PYTHON=...)
	@$(call need,$(PYTHON) -c 'import ensurepip; import venv','$(PYTHON)' cannot make a virtual environment with pip: install its venv package (Debian: python3-venv))
	@$(call need,$(PYTHON) -c 'import sysconfig as s; open(s.get_path("include") + "/Python.h")','$(PYTHON)' has no C headers (Python.h): install its dev package (Debian: python3-dev))
	@$(call need,command -v g++,g++ is missing: Megatron compiles its data helpers (Debian: apt-get install g++))
	@$(call need,command -v patch,patch is missing: it prepares the Megatron-LM tree (Debian: apt-get install patch))
	@echo "making a virtual environment in $(VENV) ($$($(PYTHON) -V))"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The CPU build, first: nothing that is installed later can then bring a CUDA stack. It is at hand (a local index
# or find-links), or on PyTorch's own index, or, where neither has one, the plain build of the package index.
$(TORCH_READY): $(VENV_READY)
	@rm -f $(VENV)/.torch-*
	@$(call logged,installing torch $(TORCH),\
	$(BIN)/pip install 'torch==$(TORCH)+cpu' \
	|| $(BIN)/pip install --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH)+cpu' \
	|| $(BIN)/pip install 'torch==$(TORCH)')
	@touch $@

$(PROJECT_READY): $(TORCH_READY) pyproject.toml
	@echo 'torch==$(TORCH)' >$(VENV)/constraints.txt
	@$(call logged,installing the project and what its demo and tests need,\
	$(BIN)/pip install -c $(VENV)/constraints.txt -e '.[test]')
	@touch $@

$(FRAMEWORKS_READY): tests/frameworks/prepare.py $(PROJECT_READY)
	@echo "preparing the frameworks in $(@D)"
	@$(BIN)/python tests/frameworks/prepare.py
	@touch $@

clean:
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -not -path './.cache/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-torch-* .cache
