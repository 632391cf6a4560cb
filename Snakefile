# From preference data to a chat model, in the order of the rule files.
#
#   output/data/DATASET      records            output/sft/RECIPE      fine-tuned model
#   output/split/DATASET     rows of phases     output/reward/RECIPE   reward model
#   output/tokens/STAGE/...  token arrays       output/dpo/RECIPE      chat model, by DPO
#   output/models/MODEL      base models        output/rlhf/RECIPE     chat model, by RL
#   output/reference/...     DPO's reference    output/eval/...        metrics of each model
#   output/generations/...   responses          output/scores/...      scores of responses
#   output/report/...        pages, records     output/compare/...     recipes, compared
#   output/prompt_eval/...   responses          output/rw_eval/...     scored responses
#   output/gate/...          gates, passed      output/benchmark/...   metrics of commands
#
# Each path leads to a folder of output/store, whose manifest.json lists what it was made from and
# its files.

import json
import os
import sys
from importlib.metadata import distributions
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

VERSION = "1.0.0"
# The sources are beside this file, which may be a module of another Snakefile. If Snakemake reads it
# from a repository, as `github(...)`, they are in the package `snakechat` of the environment. On a
# cluster, Snakemake plans again in each job, with the sources and the config of the build that
# submitted it (snakechat.workflow.code_digests).
if workflow.remote_exec:
    BUILD = json.loads(Path(os.environ["SNAKECHAT_BUILD"]).read_text())
elif isinstance(workflow.current_basedir, os.PathLike):
    BUILD = {"sources": os.fspath(workflow.current_basedir)}
else:
    installed = {package.version: package for package in distributions(name="snakechat")}
    if VERSION not in installed:
        sys.exit(
            f"error: {workflow.current_basedir} needs the package snakechat {VERSION}, and this"
            f" environment has {', '.join(installed) or 'none'}: pip install 'snakechat @ git+URL@TAG'"
        )
    BUILD = {"sources": str(installed[VERSION].locate_file("snakechat"))}
sys.path.insert(0, f"{BUILD['sources']}/scripts")

from snakechat.snakefile import fails_in_one_line, functions_of

# Snakemake has read the files of --configfile already, or the module's `config`.
FUNCTIONS = fails_in_one_line(functions_of)(workflow, config, BUILD)
# The captions of the report read it.
config = FUNCTIONS.config.values


include: f"{BUILD['sources']}/rules/common.smk"
include: f"{BUILD['sources']}/rules/data.smk"
include: f"{BUILD['sources']}/rules/models.smk"
include: f"{BUILD['sources']}/rules/sft.smk"
include: f"{BUILD['sources']}/rules/reward.smk"
include: f"{BUILD['sources']}/rules/dpo.smk"
include: f"{BUILD['sources']}/rules/rlhf.smk"
include: f"{BUILD['sources']}/rules/generations.smk"
include: f"{BUILD['sources']}/rules/evaluation.smk"
include: f"{BUILD['sources']}/rules/pages.smk"


# Without a target: rebuild what is stale of the results that exist; in a fresh tree, build the tiny
# recipe.
rule all:
    default_target: True
    input:
        FUNCTIONS.unnamed_targets,
