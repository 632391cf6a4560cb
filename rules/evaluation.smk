# Gates of recipes, responses of models to prompts that users write, scores of reward models, and
# benchmarks by commands of users. Pages are in pages.smk.


use rule job as check_gate with:
    input:
        unpack(inputs("check_gate", evaluation="output/eval/{stage}/{name}")),
    output:
        "output/gate/{stage}/{name}.manifest.json",
    log:
        "output/logs/check_gate/{stage}/{name}.log",
    localrule: True
    message:
        "Checking the gate of {wildcards.stage}/{wildcards.name}"


use rule job as prompt_eval with:
    input:
        unpack(inputs("prompt_eval")),
    output:
        "output/prompt_eval/{stage}/{name}.manifest.json",
    log:
        "output/logs/prompt_eval/{stage}/{name}.log",
    wildcard_constraints:
        stage="sft|dpo|rlhf",
    resources:
        **OF_PLACEMENT,
    message:
        "Generating responses of the models of {wildcards.stage}/{wildcards.name}"


use rule job as rw_eval with:
    input:
        unpack(inputs("rw_eval", model="output/reward/{name}")),
    output:
        "output/rw_eval/reward/{name}.manifest.json",
    log:
        "output/logs/rw_eval/reward/{name}.log",
    resources:
        **OF_PLACEMENT,
    message:
        "Scoring good and bad responses with reward model {wildcards.name}"


use rule job as run_benchmark with:
    input:
        unpack(inputs("run_benchmark")),
    output:
        "output/benchmark/{benchmark}/{stage}/{name}.manifest.json",
    log:
        "output/logs/run_benchmark/{benchmark}/{stage}/{name}.log",
    wildcard_constraints:
        benchmark=RECIPE_NAME.pattern,
        stage="|".join([*STAGES, "models"]),
    resources:
        **OF_PLACEMENT,
    message:
        "Running benchmark {wildcards.benchmark} on {wildcards.stage}/{wildcards.name}"
