# `make generate` and `make test` need nothing but Python >= 3.11 and its venv module; set-up goes to .venv.

PYTHON  ?= python3
WORKERS ?= 2

BIN       := .venv/bin
INSTALLED := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# Triton and NineToothed keep files under HOME; an empty name would put them in /.
ifeq ($(strip $(HOME)),)
export HOME := $(CURDIR)/.venv
endif

.PHONY: generate test test-all lint wheel clean

generate: $(INSTALLED)
	$(BIN)/python -m tilewright build --all --out generated
	$(BIN)/python -m tilewright check

test: lint
	$(BIN)/pytest tests/cpu tests/compile -m "not full" -n $(WORKERS) --durations=15

# The full grids. The scripts of tests/gpu are run by hand, where there is a GPU.
test-all: lint
	$(BIN)/pytest tests -m "" -n $(WORKERS) --durations=15

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/mypy tilewright

# What is left in build/ from an earlier tree would be packed too.
wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf .venv build dist generated *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	touch $@
