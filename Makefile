# make demo   from nothing to results: environment, build, model, an example file of prompts
# make test   what tests need, then all of them: test-suite, test-masked, ctest
# make test-suite PYTEST_ARGS="tests/batch -k resume"   some of them
# make dev    editable install for work on coremill; afterwards `make native` rebuilds the C side in seconds
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Where an editable install keeps its CMake build; other trees (sanitizers, C tests) lie beside it.
BUILD := build/editable

# Everything that ends up in the wheel or in the extension module.
SOURCES := pyproject.toml $(shell find top config native worker coordinator tools -type f -not -path '*/__pycache__/*')

.PHONY: demo test test-suite test-masked dev native ctest lint clean
.DELETE_ON_ERROR:
# Every step changes the one environment; two pips at once would trip over each other.
.NOTPARALLEL:

demo: $(VENV)/.installed
	@[ demo-results.jsonl -nt examples/prompts.jsonl ] || rm -f demo-results.jsonl demo-results.jsonl.journal demo-results.errors.jsonl
	@$(VENV)/bin/coremill run examples/prompts.jsonl -m smollm2 -o demo-results.jsonl --show 30
	@echo
	@echo "SmolLM2 is tiny (135 million parameters): good for short tasks, not for facts or reasoning."
	@echo "Now yours:  . $(VENV)/bin/activate"
	@echo "            coremill run prompts.jsonl -m model.gguf -o results.jsonl   (docs/batch.md)"

test: test-suite test-masked ctest

# Kills and clocks of real processes depend on what else the machine does: what failed is told, and tried once more.
test-suite: $(VENV)/.installed-test
	$(PY) -m pytest $(PYTEST_ARGS) || { \
	  [ $$? -eq 1 ] && echo "Failed tests once more; each must pass now:" && \
	  $(PY) -m pytest --last-failed --last-failed-no-failures none $(PYTEST_ARGS); }

# Kernels, engine and model again on each path that this CPU can take when features are missing.
test-masked: $(VENV)/.installed-test
	$(PY) tests/masked.py

dev: $(VENV)/.dev

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis demo-results*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "coremill needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo "this Python has no venv module; install it (python3-venv on Debian and Ubuntu)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# An editable install is never replaced by a plain one: there, only the C side can be out of date.
$(VENV)/.installed: $(SOURCES) | $(VENV)/.created
	@if [ -e $(VENV)/.dev ]; then $(MAKE) native; else $(PIP) install .; fi
	@touch $@

$(VENV)/.installed-test: $(SOURCES) | $(VENV)/.created
	@if [ -e $(VENV)/.dev ]; then $(MAKE) native; else $(PIP) install '.[dev]'; fi
	@touch $@ $(VENV)/.installed

# Without isolation the build tree keeps its compiler and CMake paths, so it can be reused by `make native`.
$(VENV)/.dev: pyproject.toml | $(VENV)/.created
	$(PIP) install 'scikit-build-core>=1.1' 'cffi>=1.17' 'cmake>=3.26' 'ninja>=1.10'
	$(PIP) install --no-build-isolation -e '.[dev]'
	@touch $@

# Rebuild the extension of an editable install. The lock lets several people share one tree; the rename lets
# running processes keep the file they have mapped.
native: $(VENV)/.dev
	@dest=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/coremill/native && \
	flock $(BUILD) sh -ec "$(VENV)/bin/cmake --build $(BUILD) && \
	  cmp -s $(BUILD)/_native.abi3.so $$dest/_native.abi3.so || \
	  { cp $(BUILD)/_native.abi3.so $$dest/.new && mv -f $$dest/.new $$dest/_native.abi3.so; }"

# The C side's own tests, plain and under the address and undefined behaviour sanitizers.
ctest: $(VENV)/.installed-test
	for kind in plain sanitize; do \
	  sanitize=OFF; [ $$kind = plain ] || sanitize=ON; \
	  $(VENV)/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja -S native -B build/ctest-$$kind \
	    -DCOREMILL_BUILD_CTESTS=ON -DCOREMILL_SANITIZE=$$sanitize && \
	  $(VENV)/bin/cmake --build build/ctest-$$kind && \
	  $(VENV)/bin/ctest --test-dir build/ctest-$$kind --output-on-failure || exit 1; done
