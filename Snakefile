# From preference data to a chat model, in the order of the rule files.
#
#   output/data/DATASET      records            output/sft/RECIPE      fine-tuned model
#   output/split/DATASET     rows of phases     output/reward/RECIPE   reward model
#   output/tokens/PHASE/...  token arrays       output/dpo/RECIPE      chat model, by DPO
#   output/models/MODEL      base models        output/rlhf/RECIPE     chat model, by RL
#   output/reference/...     DPO's reference    output/eval/...        metrics of each model
#   output/generations/...   responses          output/scores/...      scores of responses
#   output/report/...        pages, records     output/compare/...     recipes, compared
#   output/prompt_eval/...   responses          output/rw_eval/...     scored responses
#   output/gate/...          gates, passed
#
# Each path is a link to a folder in output/store, whose manifest.json lists what it was made from
# and its files.

import json
import os
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

# The folder of this file, which may be a module of another Snakefile. On a cluster, Snakemake plans
# again in each job, with the sources and the config of the build that submitted it
# (snakechat.workflow.snapshot).
BUILD = {"sources": str(Path(workflow.current_basedir))}
if workflow.remote_exec:
    BUILD = json.loads(Path(os.environ["SNAKECHAT_BUILD"]).read_text())
sys.path.insert(0, f"{BUILD['sources']}/scripts")

from snakechat.rules.functions import RuleFunctions, fails_in_one_line

# Snakemake has read the files of --configfile already, or the module's `config`.
FUNCTIONS = fails_in_one_line(RuleFunctions)(workflow, config, BUILD)
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
