# Two commands matter: `make quickstart` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL := runs/models/glass-en
ENGINE ?= embedded
MEGATRON := 0.19.2
SUPPORTED := 0.16.1 0.17.1 0.18.2 0.19.2
OTHER_MEGATRON := build/megatron-core-

.PHONY: quickstart setup test test-others test-ranks test-megatron megatron-removals lint format types bench bench-utils layouts clean

quickstart: $(VENV)/.core $(MODEL)/config.json $(if $(filter sglang,$(ENGINE)),$(VENV)/.sglang)  ## train a small language model by PPO, about a minute once installed; ENGINE=sglang for SGLang
	$(BIN)/python scripts/train_ppo.py --config configs/quickstart_cpu.yaml --rollout-engine $(ENGINE) $(ARGS)

setup: $(VENV)/.core $(VENV)/.sglang $(VENV)/.test  ## everything for running, testing and SGLang on a CPU

test: setup $(MODEL)/config.json lint types  ## lint, types and all tests, in two processes side by side; ARGS="..." is for one
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory --keep-going --jobs 2 test-others test-ranks
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-others:
	$(BIN)/python -m pytest --ignore=tests/dist

test-ranks:  # its output comes as a whole, after the end
	@mkdir -p build
	@$(BIN)/python -m pytest tests/dist > build/test-ranks.log 2>&1; code=$$?; echo "tests/dist:"; cat build/test-ranks.log; exit $$code

test-megatron: $(VENV)/.test $(OTHER_MEGATRON)$(MEGATRON)/.installed  ## the tests that run Megatron, on another version of it
	PYTHONPATH=$(CURDIR)/$(OTHER_MEGATRON)$(MEGATRON) $(BIN)/python -c 'import importlib.util as u; print(u.find_spec("megatron.core").origin)'
	PYTHONPATH=$(CURDIR)/$(OTHER_MEGATRON)$(MEGATRON) $(BIN)/python -m pytest tests/dist/backends tests/unit/backends $(ARGS)

megatron-removals: $(VENV)/.core $(SUPPORTED:%=$(OTHER_MEGATRON)%/.installed)  ## what each supported version has taken away
	$(BIN)/python tools/megatron_removals.py $(SUPPORTED:%=$(OTHER_MEGATRON)%) > build/removals.txt
	mv build/removals.txt tests/unit/backends/megatron/removals.txt

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.test
	$(BIN)/mypy

bench: $(VENV)/.test $(MODEL)/config.json  ## cost of one PPO iteration against a single-process loop
	$(BIN)/python tools/bench_iteration.py $(ARGS)

layouts: $(VENV)/.test  ## three PPO rollouts in every layout against one rank, as a table, a few minutes
	$(BIN)/python -m pytest tests/dist/backends/test_layout_matrix.py --layout-table runs/layouts.md $(ARGS)
	@cat runs/layouts.md

bench-utils: $(VENV)/.core  ## time, memory and error of ppo_utils against the usual ways, a few minutes
	$(BIN)/python tools/bench_ppo_utils.py $(ARGS)

clean:  ## what the Makefile made; your runs stay
	rm -rf $(VENV) runs/models build *.egg-info

# from 0.17 on the wheels are for Python 3.12 only, for the sake of a compiled helper of data sets that no trainer imports
$(OTHER_MEGATRON)%/.installed: | $(VENV)/.core
	$(PIP) --no-deps --ignore-requires-python --only-binary=:all: --python-version 3.12 --target $(@D) --upgrade megatron-core==$*
	@touch $@

$(VENV)/.core: setup.py requirements/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c requirements/cpu.txt torch==2.13.0 -e '.[quickstart]'
	@touch $@

# on a CPU SGLang goes without its own requirements, which are those of CUDA
$(VENV)/.sglang: $(VENV)/.core requirements/sglang-cpu.txt
	$(PIP) -c requirements/cpu.txt -r requirements/sglang-cpu.txt
	$(PIP) --no-deps sglang==0.5.23
	@touch $@

$(VENV)/.test: $(VENV)/.core $(VENV)/.sglang
	$(PIP) -c requirements/cpu.txt -e '.[quickstart,math,tensorboard,wandb,test]'
	@touch $@

$(MODEL)/config.json: $(VENV)/.core tools/convert_glass_to_hf.py
	$(BIN)/python tools/convert_glass_to_hf.py $(MODEL) --force
