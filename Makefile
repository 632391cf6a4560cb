# make demo: the tiny recipe, from nothing to a report. make test: every test without cluster or GPU.
# make test-slurm: builds on a Slurm that it starts.

PYTHON ?= python3
VENV := .venv
ACTIVATE := . $(VENV)/bin/activate &&
# TRL, which bench-train and bench-rlhf compare with, in an environment of its own.
TRL := .venv-trl

# Where results have to be the same bytes, so must the cores be.
CORES ?= 2
TARGET ?= output/rlhf/tiny

.PHONY: demo test test-slurm lint docs reproduce bench-data bench-train bench-rlhf bench-reward clean

demo: $(VENV)/demo
	$(ACTIVATE) snakemake --logger rich --cores $(CORES) output/rlhf/tiny
	$(ACTIVATE) snakemake --report report.html
	@echo "Report: report.html  Figures: output/eval/rlhf/tiny/metrics.json  Model: output/rlhf/tiny"
	@echo "Talk to it: $(VENV)/bin/python scripts/chat.py output/rlhf/tiny"

test: $(VENV)/test lint
	$(ACTIVATE) pytest --numprocesses $(CORES) --dist loadfile

# Needs root and Debian's packages, which it installs where it can. Elsewhere the tests say so.
test-slurm: export PATH := $(PATH):/usr/sbin
test-slurm: $(VENV)/test
	@if [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then \
	    apt-get update && DEBIAN_FRONTEND=noninteractive \
	    apt-get install --yes --no-install-recommends slurm-wlm munge; fi
	$(ACTIVATE) pytest -m slurm tests/test_slurm.py

lint: $(VENV)/test
	$(ACTIVATE) ruff check . && ruff format --check . && snakefmt --check Snakefile rules

# The pages of all keys of config.yaml, in both languages.
docs: $(VENV)/demo
	$(ACTIVATE) python docs/config_reference.py

# A certificate: TARGET is built again in a folder of its own, from the sources on, and compared with
# what is in output, file by file. OPTIONS: --configfile and --config as they were.
reproduce: $(VENV)/demo
	rm -rf reproduced
	$(ACTIVATE) snakemake $(TARGET) --directory reproduced --cores $(CORES) $(OPTIONS)
	$(ACTIVATE) python scripts/verify.py reproduced/output --same-as output

# How fast, small and lean data is prepared, beside the tokenizers library and DeepSpeed-Chat's way.
bench-data: $(VENV)/demo
	$(ACTIVATE) python tests/benchmarks/data.py > $(VENV)/data.json
	mv $(VENV)/data.json tests/benchmarks/results/

# How fast training is and what memory it takes, beside DeepSpeed-Chat's way and TRL.
bench-train: $(VENV)/demo $(TRL)/ready
	$(ACTIVATE) python tests/benchmarks/train.py --trl-python $(TRL)/bin/python > $(VENV)/train.json
	test ! -s $(VENV)/train.json || mv $(VENV)/train.json tests/benchmarks/results/

# How fast steps of PPO, RLOO and GRPO are, and what memory they take, beside the same two.
bench-rlhf: $(VENV)/demo $(TRL)/ready
	$(ACTIVATE) python tests/benchmarks/rlhf.py --trl-python $(TRL)/bin/python > $(VENV)/rlhf.json
	test ! -s $(VENV)/rlhf.json || mv $(VENV)/rlhf.json tests/benchmarks/results/

# What a small reward model learns from real pairs, beside the rule that the longer answer wins.
bench-reward: $(VENV)/demo
	$(ACTIVATE) python tests/benchmarks/reward.py > $(VENV)/reward.json
	test ! -s $(VENV)/reward.json || mv $(VENV)/reward.json tests/benchmarks/results/

clean:
	rm -rf $(VENV) $(TRL) .snakemake reproduced

$(VENV)/demo: requirements.txt
	@echo "Installing requirements.txt into $(VENV): some minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(ACTIVATE) pip install --quiet --requirement requirements.txt
	touch $@

$(VENV)/test: requirements-test.txt requirements-kubernetes.txt $(VENV)/demo
	$(ACTIVATE) pip install --quiet --requirement requirements-test.txt
	touch $@

$(TRL)/ready: tests/benchmarks/requirements-trl.txt
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --requirement $<
	touch $@
