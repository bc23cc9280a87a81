# `make train`, `make test` and `make check` need only Python 3.11 or newer, with venv: each of them
# first sets up an environment in .venv, with uv if there is one, else with pip.

BIN := .venv/bin
READY := .venv/.ready
# Compiled once, also where the environment says that none is kept: each of the hundreds of processes
# of the tests would compile the library anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup train test check cluster slurm proof messages mutants soak storms bench recovery

setup: $(READY)

train: $(READY)
	$(BIN)/elastic-train recipes/barlow.py --min-nodes 1 --max-nodes 4

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadgroup

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# The stamp is written last, so that an interrupted setup is repeated. `uv pip` is used because
# `uv sync` would write a lock file.
$(READY): pyproject.toml
	@set -e; if command -v uv >/dev/null; then \
	  test -x $(BIN)/python || uv venv --python '>=3.11' .venv; \
	  uv pip install --python $(BIN)/python --group dev --editable .; \
	else \
	  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "expected Python 3.11 or newer, found $$(python3 --version 2>&1); install one, or uv"; exit 1; }; \
	  test -x $(BIN)/python || python3 -m venv .venv; \
	  $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip; \
	  $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'; \
	  $(BIN)/python -m pip install --group dev --editable .; \
	fi
	@touch $(READY)

# Run every scenario on containers. Needs root, and installs missing programs with apt. NAMES="zombie undisturbed": only these. NAMES=--quick: one of each kind. STANDBY=on: with standby workers; SHARDED=on: with run.fully_shard.
export STANDBY SHARDED
cluster: $(READY)
	$(BIN)/python tests/cluster/run.py $(NAMES)

# Run every scenario on a real Slurm, of Debian's packages in a temporary folder; needs apt-get, and no
# root. NAMES="preempted time_limit": only these.
slurm: $(READY)
	$(BIN)/python tests/slurm/play.py $(NAMES)

# Which comparison finds which kind of hidden state: makes docs/proof.md, in half an hour.
proof: $(READY)
	$(BIN)/python tests/hidden_state/measure.py

# Writes tests/pure/messages.txt, all that the library says to users, after a message has changed.
messages: $(READY)
	$(BIN)/python tests/support/messages.py

# Breaks chosen lines of the core, one at a time: the tests named for each must fail. Under twenty minutes.
# ONLY="tree replay": those whose file or test has such a part.
mutants: $(READY)
	$(BIN)/python tests/support/mutants.py $(ONLY)

# Two hundred random kills in one run; takes about ten minutes.
soak: $(READY)
	$(BIN)/python benchmarks/soak.py

# More random storms over a simulated group, without processes: make storms STORMS=1000.
# The name of a test that fails has the seed that plays it again.
storms: $(READY)
	STORMS=$(or $(STORMS),100) $(BIN)/python -m pytest tests/pure/test_random_storm.py

# What a step costs beside plain PyTorch and DistributedDataParallel: a table with its aims, in under fifteen minutes on idle cores.
# make bench ALL=1, or ONLY="mlp64-1w-8s-fp32 gpt-*"; MARKDOWN=FILE and JSON=FILE are written as well.
bench: $(READY)
	$(BIN)/python benchmarks/steady.py $(if $(ALL),--all) $(if $(ONLY),--only $(foreach name,$(ONLY),'$(name)')) \
	  $(if $(MARKDOWN),--markdown $(MARKDOWN)) $(if $(JSON),--json $(JSON))

# What snapshots and recoveries cost, beside torchrun's.
recovery: $(READY)
	$(BIN)/python benchmarks/snapshot_cost.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/recovery.py
