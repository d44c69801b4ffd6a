# `make help` lists the targets. All of them work in .venv, which they make themselves; ARGS is handed to the command.
# Another Python: make PYTHON=/usr/bin/python3.12 TARGET

PYTHON ?=
ARGS ?=
URL ?=
TORCH ?=
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-torch lint format docs dist lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /|/' | awk -F'|' '{printf "make %-9s %s\n", $$1, $$2}'

demo: .venv/installed-demo ## train handwritten digits on 2 worker processes, to runs/digits
	.venv/bin/torusgd train digits --workers 2 --out runs/digits $(ARGS)

# Tests that start ranks wait as much as they compute, so more files of tests run at a time than the two cores of CI.
# They start hundreds of processes, each of which would compile the package for itself if none wrote bytecode.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: .venv/installed-dev ## run the tests, such as: make test ARGS='-k lars'
	.venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: .venv/installed-dev ## run the long campaigns, which `make test` leaves out
	.venv/bin/python -m pytest -n 2 --dist loadfile -m slow $(ARGS)

test-all: .venv/installed-all ## run the tests with every extra installed, and count what is skipped
	.venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -r s $(ARGS)

# Its environment is a folder of its own, .venv-torch-VERSION; constraints.txt pins all but torch and what it needs.
test-torch: .venv/made ## run the tests with another torch: make test-torch TORCH=2.9.1, or TORCH=newest
	@test -n '$(TORCH)' || { echo "name a version: make test-torch TORCH=2.9.1, or TORCH=newest" >&2; exit 2; }
	.venv/bin/python -m venv --clear .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1,<26'
	grep -vE '^(torch|triton|nvidia|cuda|setuptools)' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	.venv-torch-$(TORCH)/bin/python -m pip install --disable-pip-version-check -c .venv-torch-$(TORCH)/constraints.txt \
		$(if $(filter newest,$(TORCH)),torch,torch==$(TORCH)) -e '.[digits,images,tensorboard]' --group dev
	.venv-torch-$(TORCH)/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/installed-dev ## check style and types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

format: .venv/installed-dev ## mend style
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs: .venv/installed-docs ## build the documentation as a site, in build/site
	.venv/bin/python -m tools.reference_pages
	.venv/bin/zensical build --strict $(ARGS)

# URL is the address of the repository, which the pages of an index link to.
dist: .venv/installed-dist ## build wheel and sdist in dist, ready to upload: make dist URL=https://...
	rm -rf dist
	TORUSGD_URL='$(URL)' .venv/bin/python -m build $(ARGS)
	.venv/bin/twine check --strict dist/*

lock: .venv/installed-dist ## choose versions anew: uv.lock, with hashes, and constraints.txt from it
	.venv/bin/uv lock $(ARGS)
	(sed '/^#/!d' constraints.txt; .venv/bin/uv export --frozen -q --no-hashes --all-extras --all-groups \
		--no-emit-project --no-annotate --no-header | .venv/bin/uv pip compile -q - --no-deps --no-annotate \
		--no-header --python-version 3.11.7 --python-platform x86_64-unknown-linux-gnu) > constraints.new
	mv constraints.new constraints.txt

clean: ## remove .venv and caches, and leave runs/
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

.venv/installed-demo: WHAT = -e '.[digits]'
.venv/installed-dev: WHAT = -e '.[digits,images,tensorboard]' --group dev
# torch asks for the Triton that it was built with, whose interpreter fuses and fails on NumPy 2.4: its tests take 3.9.
.venv/installed-all: THEN = .venv/bin/python -m pip install --disable-pip-version-check --no-deps triton==3.9.0
# torchvision of PyPI is built for PyPI's torch: its operators are missing beside a torch for CPUs alone (2.13.0+cpu).
.venv/installed-all: WHAT = -e '.[all,triton]' --group dev --group extras \
	$(shell sed -n 's/^\(torch\|torchvision\)==/\1===/p' constraints.txt)
.venv/installed-docs: WHAT = -e . --group docs
.venv/installed-dist: WHAT = --group dist
.venv/installed-demo .venv/installed-dev .venv/installed-all .venv/installed-docs .venv/installed-dist: .venv/made pyproject.toml constraints.txt
	@echo "Installing torusgd and the versions in constraints.txt into .venv; PyTorch is large, the rest is small."
	.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt $(WHAT)
	$(THEN)
	@touch $@

# Debian and Ubuntu leave ensurepip out of their Python: without it a virtual environment has no pip.
.venv/made:
	@for python in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14); do \
		if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "torusgd needs Python 3.11 to 3.14$(if $(PYTHON),; $(PYTHON) is not); apt install python3.11 python3.11-venv" >&2; \
		exit 1; \
	elif ! $$found -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$$found has no venv module: apt install $$(basename $$found)-venv" >&2; \
		exit 1; \
	fi; \
	$$found -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1,<26'  # for --group
	@touch $@
