# Every target sets up .venv first when pyproject.toml is newer than the last finished install.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_PAGE := .flatout/demo.html
DEMO_EVIDENCE := .flatout/demo.json
DEMO_TUNED := .flatout/demo.toml
DEMO_TUNING := .flatout/tuning.html
DEMO_JOB := examples/darkroom/train.py --size small
DIAGNOSE ?= $(BIN)/flatout diagnose --seconds 45
TUNE ?= --only one-gather --only garbage-every
BENCH ?= *

.PHONY: demo test planted fuzz check format bench upgrade tables docs

# One thread: the example's operators are tiny, and its two loader workers want the cores.  TUNE= stops after
# the diagnosis; what is kept stays in .flatout, and the example as it is.
demo: export OMP_NUM_THREADS := 1
demo: $(INSTALLED)
	@mkdir -p $(dir $(DEMO_PAGE))
	@$(DIAGNOSE) --save $(DEMO_EVIDENCE) --html $(DEMO_PAGE) $(DEMO_JOB); status=$$?; \
	if [ $$status -eq 0 ]; then echo "make demo: nothing found in a script that is slow on purpose" >&2; exit 1; fi; \
	if [ $$status -ne 1 ]; then exit $$status; fi; \
	echo "The report as a page, with the timeline of a step and the source lines: $(DEMO_PAGE)"
ifneq ($(TUNE),)
	@echo; echo "Now Flatout tries what makes it faster, in real runs, and checks the numbers."
	@rm -f $(DEMO_TUNED)
	@$(BIN)/flatout tune --patch $(TUNE) --evidence $(DEMO_EVIDENCE) --to $(DEMO_TUNED) --html $(DEMO_TUNING) $(DEMO_JOB)
	@if [ ! -e $(DEMO_TUNED) ]; then echo "No gain could be proven. Is the machine busy?"; exit; fi; \
	echo; echo "The script with what was kept; afterwards the patch is reverted:"; \
	if $(BIN)/flatout tune --apply --to $(DEMO_TUNED); then \
	  trap '$(BIN)/flatout tune --undo --to $(DEMO_TUNED)' EXIT; fi; \
	$(BIN)/flatout run --with $(DEMO_TUNED) $(DEMO_JOB) --steps 60
endif

# What judges gains runs alone; everything else runs in $(JOBS) processes of one thread: three keep two cores
# busy, as a test of commands waits for a third of its time (for a cluster, a signal, a server).  The files of
# tests/cli are the long ones: they come first and in the order given, so that the many short files of
# tests/unit level the end.  A test that fails beside the others is judged by a second run without them:
# the first still shows.
JOBS ?= 3
ALONE := tests/planted
TOGETHER := $(sort $(wildcard tests/cli/test_*.py)) tests/unit tests/contract tests/gpu
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder \
	  $(TOGETHER) || \
	{ test $$? -eq 1 && echo "Again, alone:" && \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }
	$(BIN)/python -m pytest $(ALONE)

# Every planted script and its clean twin, diagnosed live; `make test` runs a few and replays the recorded ones.
planted: $(INSTALLED)
	FLATOUT_PLANTED=all $(BIN)/python -m pytest tests/planted

# Property tests with random examples, many more than `make test` tries.  What this finds becomes an @example.
FUZZ ?= $(shell grep -rlE '^from hypothesis|^import hypothesis' tests/unit)
fuzz: $(INSTALLED)
	FLATOUT_FUZZ=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --timeout 3600 $(FUZZ)

check: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix-only --exit-zero
	$(BIN)/ruff format

# One claim: make bench BENCH=overhead
bench: $(INSTALLED)
	@set -e; count=0; for script in benchmarks/$(BENCH)/run.py; do \
	  [ -e "$$script" ] || continue; count=$$((count + 1)); \
	  echo "== $$script"; $(BIN)/python "$$script"; \
	done; \
	if [ $$count -eq 0 ]; then echo "make bench: no benchmarks/$(BENCH)/run.py" >&2; exit 2; fi

# The newest release of every dependency, written to constraints.txt: run `make check test` next.
upgrade:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	{ echo "# Versions that the tests passed with; \`make upgrade\` writes this file."; \
	  $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.txt
	@touch $(INSTALLED)

# Tables of docs/ from the result files of the benchmarks; a test holds them to be current.
tables: $(INSTALLED)
	$(BIN)/python docs/tables.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# One pip call resolves everything together: the torch pinned in the dev extra decides which build comes,
# and a torch-dependent package installed earlier would bring another.  constraints.txt keeps the versions
# the tests last passed with, so that a release of somebody else's changes no answer; `make upgrade` takes
# the newest instead and writes them there.  An install that was interrupted
# leaves its marker behind and is made again from nothing.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "flatout needs Python 3.11 or later; $(PYTHON) is not. Try: make PYTHON=python3.12" >&2; exit 2; }
	@if [ -e $(VENV)/.installing ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(VENV)/.installing
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@mv $(VENV)/.installing $@ && touch $@
