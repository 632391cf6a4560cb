# Gates of recipes, responses of models to prompts that users write, and scores of reward models.


SPECS.describe(
    "check_gate",
    folder="gate",
    settings=lambda stage, name: gate_settings(CONFIG, stage, name),
    inputs=lambda stage, name: {"evaluation": (f"evaluate_{stage}", name)},
)
SPECS.describe(
    "prompt_eval",
    folder="prompt_eval",
    settings=lambda stage, name: prompt_eval_settings(CONFIG, stage, name),
    inputs=lambda stage, name: models_of(CONFIG, stage, name),
    files=lambda stage, name: prompt_set_files(CONFIG, "prompts", stage, name),
    runs_models=True,
)
SPECS.describe(
    "rw_eval",
    folder="rw_eval/reward",
    settings=lambda name: prompt_page_settings(CONFIG, "reward", name),
    inputs=lambda name: {"model": ("train_reward", name)},
    files=lambda name: prompt_set_files(CONFIG, "prompts/pairs", "reward", name),
    runs_models=True,
)


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
        spec=spec_file,
        program=program("check_gate"),
        placement=COMMON_PLACEMENT_JSON,
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
    threads: threads_of(work="evaluation")
    resources:
        **resources_of(work="evaluation"),
    params:
        spec=spec_file,
        program=program("prompt_eval"),
        placement=placement_json(work="evaluation", source=os.path.relpath(ROOT)),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Generating responses of the models of {wildcards.stage}/{wildcards.name}"
    shell:
        f"{RUN} && cp {{params.result:q}}/responses.html{TO_PAGE}"


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
    threads: threads_of("reward", work="evaluation")
    resources:
        **resources_of("reward", work="evaluation"),
    params:
        spec=spec_file,
        program=program("rw_eval"),
        placement=placement_json("reward", work="evaluation", source=os.path.relpath(ROOT)),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Scoring good and bad responses with reward model {wildcards.name}"
    shell:
        f"{RUN} && cp {{params.result:q}}/scores.html{TO_PAGE}"
