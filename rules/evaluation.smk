# Responses of models to prompts that users write, scores of reward models, and public benchmarks.


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
SPECS.describe(
    "evaluate_tasks",
    folder="lm_eval",
    settings=lambda stage, name: lm_eval_settings(CONFIG, stage, name),
    inputs=lambda stage, name: {"model": training_job(stage, name)},
    files=lambda *_: task_files(CONFIG),
)
SPECS.describe(
    "evaluate_reward_bench",
    folder="eval/reward_bench",
    settings=lambda name: reward_bench_settings(CONFIG, name),
    inputs=lambda name: {"model": ("train_reward", name)},
    files=lambda _: reward_bench_files(CONFIG),
    runs_models=True,
)


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
    threads: threads_of(work="single_process")
    resources:
        **resources_of(work="single_process"),
    params:
        spec=spec_file,
        program=program("evaluate_tasks"),
        placement=placement_json(work="single_process", source=os.path.relpath(ROOT)),
    message:
        "Running lm-evaluation-harness on {wildcards.stage}/{wildcards.name}"
    shell:
        RUN


use rule train_sft as evaluate_reward_bench with:
    input:
        unpack(inputs("evaluate_reward_bench")),
    output:
        "output/eval/reward_bench/{name}.manifest.json",
    log:
        "output/logs/evaluate_reward_bench/{name}.log",
    threads: threads_of("reward", work="evaluation")
    resources:
        **resources_of("reward", work="evaluation"),
    params:
        spec=spec_file,
        program=program("evaluate_reward_bench"),
        placement=placement_json(
            "reward", work="evaluation", source=str(reward_bench_folder(CONFIG) or ".")
        ),
    message:
        "Evaluating reward model {wildcards.name} on RewardBench 2"
