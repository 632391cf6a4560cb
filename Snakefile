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

# Snakechat decides for a whole build what is stale, and locks it.
if not workflow.modifier.is_main_snakefile():
    sys.exit(
        "error: Snakechat cannot be a module of another Snakefile: have a rule run it"
        " (docs/en/reproducibility.md)"
    )


# On a cluster, Snakemake plans again in each job, with the sources and the config of the build that
# submitted it (snakechat.workflow.snapshot).
BUILD = {"sources": workflow.basedir}
if workflow.remote_exec:
    BUILD = json.loads(Path(os.environ["SNAKECHAT_BUILD"]).read_text())
sys.path.insert(0, f"{BUILD['sources']}/scripts")

from snakechat.config.loading import check_config_files, project_files
from snakechat.config.errors import ConfigError
from snakechat.workflow.snakemake_command_line import command_line_configfiles

CONFIG_FILES = project_files(Path(workflow.basedir))

# Before Snakemake reads these files. It has read the files of --configfile already.
if not workflow.remote_exec:
    try:
        check_config_files([*CONFIG_FILES, *command_line_configfiles(workflow)])
    except ConfigError as error:
        sys.exit(f"error: {error}")


for FILE in CONFIG_FILES:

    configfile: FILE


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
