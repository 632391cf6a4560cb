# A look at responses: of models to prompts that users write, and of reward models to pairs of responses.


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
        "../envs/rlhf.yaml"
    threads: threads_of(alone=True)
    resources:
        **resources_of(alone=True),
    params:
        program=program("prompt_eval"),
        launch=program("launch"),
        placement=placement_json(alone=True, source=os.path.relpath(ROOT)),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Asking the models of {wildcards.stage}/{wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log}) &&"
        " cp {params.result}/responses.html {output.page}"


rule rw_eval:
    input:
        unpack(inputs("rw_eval")),
    output:
        manifest="output/rw_eval/reward/{name}.manifest.json",
        page=report(
            "output/rw_eval/reward/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="responses scored",
            labels={"recipe": "reward/{name}"},
        ),
    log:
        "output/logs/rw_eval/reward/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    threads: threads_of("reward", alone=True)
    resources:
        **resources_of("reward", alone=True),
    params:
        program=program("rw_eval"),
        launch=program("launch"),
        placement=placement_json("reward", alone=True, source=os.path.relpath(ROOT)),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Scoring good and bad responses by reward model {wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log}) &&"
        " cp {params.result}/scores.html {output.page}"


rule evaluate_tasks:
    input:
        unpack(inputs("evaluate_tasks")),
    output:
        "output/lm_eval/{stage}/{name}.manifest.json",
    log:
        "output/logs/evaluate_tasks/{stage}/{name}.log",
    wildcard_constraints:
        stage="sft|dpo|rlhf",
    conda:
        "../envs/lm-eval.yaml"
    threads: threads_of(alone=True)
    resources:
        **resources_of(alone=True),
    params:
        program=program("evaluate_tasks"),
        launch=program("launch"),
        placement=placement_json(alone=True, source=os.path.relpath(ROOT)),
    message:
        "Running lm-evaluation-harness on {wildcards.stage}/{wildcards.name}"
    shell:
        "python {params.launch:q} {params.program:q} --spec {input.spec}"
        " --placement {params.placement:q} 2>&1 | (trap '' INT TERM; tee {log})"
