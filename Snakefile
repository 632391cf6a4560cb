# From preference data to a chat model, in the order of the rule files.
#
#   output/data/DATASET      records            output/sft/RECIPE      fine-tuned model
#   output/split/DATASET     rows of phases     output/reward/RECIPE   reward model
#   output/tokens/PHASE/...  token arrays       output/dpo/RECIPE      chat model, by DPO
#   output/models/MODEL      base models        output/rlhf/RECIPE     chat model, by RL
#   output/reference/...     DPO's reference    output/eval/...        metrics of each model
#   output/report/RECIPE     figures, tables    output/record/...      training records
#   output/zero/...          ZeRO stages        output/compare/...     recipes, compared
#   output/prompt_eval/...   responses          output/rw_eval/...     scored responses
#   output/lm_eval/...       tasks of lm-evaluation-harness
#
# Next to each result folder, NAME.manifest.json lists what it was made from, and its files.

from snakemake.utils import min_version

min_version("9.27")


configfile: f"{workflow.basedir}/config.yaml"


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/models.smk"
include: "rules/sft.smk"
include: "rules/reward.smk"
include: "rules/dpo.smk"
include: "rules/rlhf.smk"
include: "rules/report.smk"
include: "rules/evaluation.smk"
include: "rules/record.smk"
include: "rules/zero.smk"
include: "rules/compare.smk"


# Without a target: rebuild what is stale of the results that exist; in a fresh tree, build the tiny
# recipe.
rule all:
    default_target: True
    input:
        default_targets(CONFIG),
