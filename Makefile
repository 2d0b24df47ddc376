# Two commands on a fresh machine: make demo, make test. Both need only
# Python 3.11 or newer, make and git; they fill .venv themselves.

# Another Python: make demo PYTHON=python3.12. Force the processor: EXTRA=cpu.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

DEMO := $(PY) -m bevy_jax.experiments.decode --config=demo
BENCH := $(PY) -m bevy_jax.experiments.bench
GOLDENS := $(PY) tests/golden/make_goldens.py

# The version of the NVIDIA driver, empty where there is none. CUDA 13 needs
# driver 580 or newer; older drivers get CUDA 12.
ifeq ($(origin EXTRA),undefined)
DRIVER := $(shell \
  { sed -n 's/.*Kernel Module[^0-9]*\([0-9]*\)\..*/\1/p' \
      /proc/driver/nvidia/version || \
    nvidia-smi --query-gpu=driver_version --format=csv,noheader | \
      cut -d. -f1; } 2>/dev/null | head -n 1)
EXTRA := $(if $(DRIVER),$(shell \
  test '$(DRIVER)' -ge 580 2>/dev/null && echo cuda13 || echo cuda12),cpu)
endif

# What .venv/.run says when it fits: this folder, these extras. A copied
# checkout or a new driver makes it stale, as a newer pyproject.toml does.
WANT := $(CURDIR) $(EXTRA)
HAVE := $(shell cat $(VENV)/.run 2>/dev/null)
EXTRAS = $(if $(filter cuda%,$(EXTRA)),[$(EXTRA)])
PIP = $(PY) -m pip --disable-pip-version-check install --quiet
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# Processes that share the tests; who has none left takes some of another's.
JOBS ?= 2
SPREAD = -n $(JOBS) --dist worksteal

# Nothing of the caller's may stand before .venv and the wheel.
unexport PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help demo test tests-wheel lint docs format types bench goldens wheel \
  installed clean FORCE

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' \
	  $(firstword $(MAKEFILE_LIST))

# Only what the library needs is installed for it, no tools.
demo: $(VENV)/.run  ## decode eight texts, usual schedule and ours side by side
	$(DEMO)

# The first run sees the checkout, the second only the wheel: it alone proves
# that the wheel is whole. The second leaves out tests marked slow, and finds
# in build/programs what the first has compiled.
test: lint docs  ## lint, docs, tests in the checkout and on the wheel, types
	@rm -rf build/programs
	$(PY) -m pytest $(SPREAD) --durations=10
	$(MAKE) --no-print-directory tests-wheel types

tests-wheel: installed
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	cp -r tests "$$dir/tests" && mkdir "$$dir/empty" && cd "$$dir/empty" && \
	echo "tests from the empty folder $$dir/empty on the wheel" && \
	BEVY_CHECKOUT='$(CURDIR)' BEVY_EXPECT_WHEEL='$(CURDIR)/build/venv' \
	'$(CURDIR)/build/venv/bin/python' -m pytest $(SPREAD) -m 'not slow' \
	  -c '$(CURDIR)/pyproject.toml' --rootdir="$$dir" -p no:cacheprovider \
	  "$$dir/tests"

lint: $(VENV)/.dev  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.dev  ## ruff: put the format and simple rules right
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# From nothing each time: a page that is not built again warns of nothing.
docs: $(VENV)/.dev  ## the pages of docs/ as HTML in build/docs
	$(PY) -m sphinx -q -E -W --keep-going -b html docs build/docs

# From an empty folder on the installed wheel: the checkout's folders are not
# where their import names say.
types: installed  ## mypy, strict, on the installed wheel
	@dir=$$(mktemp -d) && trap 'rmdir "$$dir"' EXIT && cd "$$dir" && \
	'$(CURDIR)/build/venv/bin/python' -m mypy -p bevy_jax \
	  --config-file '$(CURDIR)/pyproject.toml' \
	  --cache-dir '$(CURDIR)/.mypy_cache'

bench: $(VENV)/.dev  ## the speed claims, measured on this machine
	$(BENCH)

# Needs torch and transformers, which nothing else here does.
goldens: $(VENV)/.goldens  ## rebuild tests/golden with transformers
	$(GOLDENS)

# setuptools would ship what an earlier build left in build/lib.
wheel: $(VENV)/.run  ## build dist/bevy_jax-*.whl
	@rm -rf build/lib build/bdist.* dist
	@$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps \
	  --wheel-dir dist .
	@ls -l dist/*.whl

# A second environment with the wheel in it; it borrows the dependencies of
# .venv by a path file, which leaves the editable install there unseen.
installed: wheel $(VENV)/.dev
	@rm -rf build/venv
	@$(PY) -m venv --without-pip build/venv
	@$(PY) -m pip --disable-pip-version-check --python build/venv/bin/python \
	  install --quiet --no-deps dist/*.whl
	@$(PY) $(PURELIB) > "$$(build/venv/bin/python $(PURELIB))/borrowed.pth"

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache \
	  .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last: a step that fails or is killed leaves none,
# and the next make starts from nothing.
$(VENV)/.run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed; $(PYTHON) is' \
	    "$$($(PYTHON) --version 2>&1 | head -n 1)."; \
	  echo 'Name one: make PYTHON=python3.12'; exit 1; }
	@if [ '$(HAVE)' = '$(WANT)' ] && $(PY) -c '' 2>/dev/null; then \
	  echo 'pyproject.toml changed: updating $(VENV)'; \
	else \
	  echo "making $(VENV) with $$($(PYTHON) --version)"; \
	  rm -rf $(VENV); \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo 'Python could not make $(VENV). Some systems pack venv apart:' \
	      'on Debian and Ubuntu, apt install python3-venv.'; exit 1; }; \
	fi
	@rm -f $(VENV)/.run $(VENV)/.dev $(VENV)/.goldens
	@echo 'installing bevy-jax and its dependencies for $(EXTRA)' \
	  '(cpu about 1 minute, cuda several)'
	@$(PIP) -e '.$(EXTRAS)' || { \
	  echo 'pip could not install: its message stands above. If the network' \
	    'failed, type the same command again.'; exit 1; }
	@echo '$(WANT)' > $@

ifneq ($(HAVE),$(WANT))
$(VENV)/.run: FORCE
endif

$(VENV)/.dev: $(VENV)/.run
	@echo 'installing the tools for tests, lint and types'
	@$(PIP) -e '.[dev,train]'
	@touch $@

$(VENV)/.goldens: $(VENV)/.dev
	@echo 'installing torch and transformers (several GB on some systems)'
	@$(PIP) -e '.[goldens]'
	@touch $@
