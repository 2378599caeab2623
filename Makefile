# Everything below works from a fresh clone with Python 3.11+, a Rust toolchain (rustup) and a C compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CARGO_TARGET_DIR ?= target
export CARGO_TARGET_DIR

.PHONY: help build demo test test-fast fuzz check bench lab faults soak docs clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/.tools: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "warmfront needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

RUST := $(shell find crates -name '*.rs' -o -name 'Cargo.toml') Cargo.toml Cargo.lock

$(VENV)/.built: $(VENV)/.tools $(RUST)
	@touch $@.begun
	$(BIN)/maturin develop --release --quiet
	@mv $@.begun $@ # as old as the sources that were read

build: $(VENV)/.built ## Build the package into .venv

demo: build ## Four embedded engines, round robin against prefix routing, one table
	$(BIN)/warmfront demo

test: build ## All tests: Rust, Python, and real vLLM servers
	cargo test --quiet --workspace --exclude warmfront-py
	$(BIN)/pytest

test-fast: build ## The tests that need no engine servers
	cargo test --quiet -p warmfront-core
	$(BIN)/pytest --ignore tests/integration

FUZZ_CASES ?= 20000
FUZZ_SECONDS ?= 600
# Time is up: that is success. Memory is bounded, so that an input that would take all of it fails by itself.
FUZZ_RUN = sh -c 'ulimit -v 8000000; FUZZ_CASES=$(FUZZ_CASES) scripts/within $(FUZZ_SECONDS) "$$@"' fuzz

fuzz: build ## Hostile input for long, new each time (FUZZ_CASES=20000 FUZZ_SECONDS=600 for each part)
	cargo test --quiet --release -p warmfront-core --test fuzz --no-run
	$(FUZZ_RUN) cargo test --quiet --release -p warmfront-core --test fuzz
	$(FUZZ_RUN) $(BIN)/pytest -x tests/fuzz tests/differential/test_special_tokens.py

check: build ## Every check, then every test
	scripts/check
	$(MAKE) test

bench: build ## Measure against the peers and render docs/reference/benchmarks.md
	cargo build --quiet --release -p warmfront-bench
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/report.py

lab: build ## Run every policy in every regime and render docs/explanation/regimes.md (LAB="--only chat --estimate")
	$(BIN)/python -m warmfront.lab.page $(LAB)

faults: build ## Break real fleets, ours and the peers', and render docs/reference/faults.md
	$(BIN)/python benchmarks/fault_suite.py run

soak: build ## 200,000 requests while engines die, stop and come back: nothing lost, nothing done twice
	$(BIN)/python benchmarks/soak.py

docs: build ## Render the generated pages
	$(BIN)/python scripts/docs.py

clean: ## Remove what was built
	rm -rf $(VENV) $(CARGO_TARGET_DIR)
