# Gates of recipes, responses of models to prompts that users write, and scores of reward models.
# Their pages: pages.smk.


rule check_gate:
    input:
        unpack(inputs("check_gate")),
    output:
        "output/gate/{stage}/{name}.manifest.json",
    log:
        "output/logs/check_gate/{stage}/{name}.log",
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        **params_of("check_gate"),
    message:
        "Checking the gate of {wildcards.stage}/{wildcards.name}"
    shell:
        RUN


rule prompt_eval:
    input:
        unpack(inputs("prompt_eval")),
    output:
        "output/prompt_eval/{stage}/{name}.manifest.json",
    log:
        "output/logs/prompt_eval/{stage}/{name}.log",
    wildcard_constraints:
        stage="sft|dpo|rlhf",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("prompt_eval")
    resources:
        **resources_of("prompt_eval"),
    params:
        **params_of("prompt_eval"),
    message:
        "Generating responses of the models of {wildcards.stage}/{wildcards.name}"
    shell:
        RUN


rule rw_eval:
    input:
        unpack(inputs("rw_eval")),
    output:
        "output/rw_eval/reward/{name}.manifest.json",
    log:
        "output/logs/rw_eval/reward/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("rw_eval")
    resources:
        **resources_of("rw_eval"),
    params:
        **params_of("rw_eval"),
    message:
        "Scoring good and bad responses with reward model {wildcards.name}"
    shell:
        RUN
