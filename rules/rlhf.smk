# Reinforcement learning from scores of a reward model, of functions, or of both.


SPECS.describe(
    "tokenize_rlhf",
    folder="tokens/rlhf",
    program="tokenize_phase",
    settings=lambda name: tokenization_settings(CONFIG, "rlhf", name, "max_prompt_length"),
    inputs=lambda name: tokenization_inputs(CONFIG, "rlhf", name),
)
SPECS.describe(
    "train_rlhf",
    folder="rlhf",
    settings=lambda name: CONFIG.program_settings("rlhf", name),
    inputs=lambda name: rlhf_inputs(CONFIG, name),
    runs_models=True,
)
SPECS.describe(
    "evaluate_rlhf",
    folder="eval/rlhf",
    settings=lambda name: rlhf_evaluation_settings(CONFIG, name),
    inputs=lambda name: rlhf_evaluation_inputs(CONFIG, name),
    runs_models=True,
)


use rule tokenize_sft as tokenize_rlhf with:
    input:
        unpack(inputs("tokenize_rlhf")),
    output:
        "output/tokens/rlhf/{name}.manifest.json",
    log:
        "output/logs/tokenize_rlhf/{name}.log",
    threads: threads_of("rlhf")
    message:
        "Tokenizing the RLHF prompts for {wildcards.name}"


use rule train_sft as train_rlhf with:
    input:
        unpack(inputs("train_rlhf")),
    output:
        "output/rlhf/{name}.manifest.json",
    log:
        "output/logs/train_rlhf/{name}.log",
    threads: threads_of("rlhf")
    resources:
        **resources_of("rlhf"),
    params:
        spec=spec_file,
        program=program("train_rlhf"),
        placement=placement_json("rlhf"),
    message:
        "Training {wildcards.name} by reinforcement learning"


use rule train_sft as evaluate_rlhf with:
    input:
        unpack(inputs("evaluate_rlhf")),
    output:
        "output/eval/rlhf/{name}.manifest.json",
    log:
        "output/logs/evaluate_rlhf/{name}.log",
    threads: threads_of("rlhf", work="evaluation")
    resources:
        **resources_of("rlhf", work="evaluation"),
    params:
        spec=spec_file,
        program=program("evaluate_rlhf"),
        placement=placement_json("rlhf", work="evaluation"),
    message:
        "Evaluating chat model {wildcards.name}"


rule rlhf:
    input:
        unpack(results_of("rlhf", "train_rlhf", "evaluate_rlhf")),
        ancient("output/report/rlhf/{name}"),
    output:
        directory("output/rlhf/{name}"),
