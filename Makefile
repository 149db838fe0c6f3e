# Everstep from a fresh machine: `make demo`, `make test`. Python 3.11 or newer, its venv module, nothing else.
#
#   make demo    set up if need be, then train the demo's model twice, undisturbed and through kills, and compare
#   make test    set up if need be, then run every test
#   make bench   the figures: step time beside plain DDP, pause after a kill
#   make lint    ruff and mypy
#   make clean   remove the venv, caches and build files; runs/ stays
#
# Another Python: make PYTHON=/path/to/python3.12 demo

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.everstep
TORCH := $(shell grep '^torch==' constraints.txt)
CPU_INDEX := https://download.pytorch.org/whl/cpu
RECENT := import sys; sys.exit(sys.version_info < (3, 11))
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-slow bench lint clean venv
.DELETE_ON_ERROR:

demo: $(STAMP)
	@$(BIN)/everstep demo

test: $(STAMP)
	@$(BIN)/python -m pytest

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -m slow

bench: $(STAMP)
	@$(BIN)/python -m bench

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

venv: $(STAMP)

# A venv that was made halfway, or by an older Python, is made anew. torch comes first and by itself: where there is no
# NVIDIA card its CPU build is asked for, so that no CUDA libraries are downloaded.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "everstep: no '$(PYTHON)' here: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c '$(RECENT)' || { echo "everstep: needs Python 3.11 or newer, and '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1): name a newer one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { echo "everstep: '$(PYTHON)' has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@"$(BIN)/python" -c 'import pip; $(RECENT)' 2>/dev/null || { echo "everstep: making $(VENV)"; "$(PYTHON)" -m venv --clear "$(VENV)"; }
	@echo "everstep: installing into $(VENV) (a few minutes the first time)"
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && [ ! -e /proc/driver/nvidia ]; then \
	    $(PIP) install -q --no-deps --index-url $(CPU_INDEX) --timeout 5 --retries 0 $(TORCH) 2>/dev/null \
	    || { echo "everstep: no CPU build of torch from $(CPU_INDEX), so the default one"; $(PIP) install -q --no-deps $(TORCH); }; \
	fi
	@$(PIP) install -q -e '.[dev]' -c constraints.txt
	@touch "$(STAMP)"

clean:
	rm -rf "$(VENV)" .ci/venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find runtime elastic dataloader tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
