# The road from preference data to a chat model, in the order of the rule files.
#
#   output/data/DATASET      records            output/sft/RECIPE      fine-tuned model
#   output/split/DATASET     rows of phases     output/reward/RECIPE   reward model
#   output/tokens/PHASE/...  token arrays       output/dpo/RECIPE      chat model, by DPO
#   output/models/MODEL      base models        output/rlhf/RECIPE     chat model, by PPO
#   output/reference/...     DPO's reference    output/eval/...        figures of each model
#   output/record/...        training records   output/zero/...        ZeRO stages, compared
#   output/compare/...       recipes, compared  output/prompt_eval/... responses, side by side
#   output/rw_eval/...       responses, scored    output/lm_eval/...     tasks of lm-evaluation-harness
#
# Each result folder has its NAME.manifest.json beside it: what it was made from, and its files.

from snakemake.utils import min_version

min_version("9.27")


configfile: f"{workflow.basedir}/config.yaml"


include: "rules/common.smk"
include: "rules/config.smk"
include: "rules/placement.smk"
include: "rules/volume.smk"
include: "rules/specs.smk"
include: "rules/jobs.smk"
include: "rules/data.smk"
include: "rules/models.smk"
include: "rules/sft.smk"
include: "rules/reward.smk"
include: "rules/dpo.smk"
include: "rules/rlhf.smk"
include: "rules/report.smk"
include: "rules/look.smk"
include: "rules/record.smk"
include: "rules/zero.smk"
include: "rules/compare.smk"
include: "rules/targets.smk"


# Without a target: what was built before is brought up to date; in a fresh tree, the tiny recipe.
rule all:
    default_target: True
    input:
        built_targets(),
