# Gates of recipes, responses of models to prompts that users write, and scores of reward models.


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
        manifest="output/prompt_eval/{stage}/{name}.manifest.json",
        page=report(
            "output/prompt_eval/{stage}/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="responses to prompts",
            labels={"recipe": "{stage}/{name}"},
        ),
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
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Generating responses of the models of {wildcards.stage}/{wildcards.name}"
    shell:
        f"{RUN} && {TO_RESULT}/responses.html {{output.page:q}}"


rule rw_eval:
    input:
        unpack(inputs("rw_eval")),
    output:
        manifest="output/rw_eval/reward/{name}.manifest.json",
        page=report(
            "output/rw_eval/reward/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="scored responses",
            labels={"recipe": "reward/{name}"},
        ),
    log:
        "output/logs/rw_eval/reward/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("rw_eval")
    resources:
        **resources_of("rw_eval"),
    params:
        **params_of("rw_eval"),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Scoring good and bad responses with reward model {wildcards.name}"
    shell:
        f"{RUN} && {TO_RESULT}/scores.html {{output.page:q}}"
