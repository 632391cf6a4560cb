# The reward model, trained on chosen and rejected responses to the same prompt.


SPECS.describe(
    "tokenize_reward",
    folder="tokens/reward",
    program="tokenize_phase",
    settings=lambda name: tokenization_settings(CONFIG, "reward", name, "max_length"),
    inputs=lambda name: tokenization_inputs(CONFIG, "reward", name),
)
SPECS.describe(
    "train_reward",
    folder="reward",
    settings=lambda name: CONFIG.program_settings("reward", name),
    inputs=lambda name: {
        "model": CONFIG.base_model("reward", name),
        "tokens": ("tokenize_reward", name),
    },
    runs_models=True,
)
SPECS.describe(
    "evaluate_reward",
    folder="eval/reward",
    settings=lambda name: {"datasets": held_out_datasets(CONFIG, "reward", name)},
    inputs=lambda name: {
        "model": ("train_reward", name),
        "tokens": ("tokenize_reward", name),
    },
    runs_models=True,
)


use rule tokenize_sft as tokenize_reward with:
    input:
        unpack(inputs("tokenize_reward")),
    output:
        "output/tokens/reward/{name}.manifest.json",
    log:
        "output/logs/tokenize_reward/{name}.log",
    threads: threads_of("reward")
    message:
        "Tokenizing the reward phase for {wildcards.name}"


use rule train_sft as train_reward with:
    input:
        unpack(inputs("train_reward")),
    output:
        "output/reward/{name}.manifest.json",
    log:
        "output/logs/train_reward/{name}.log",
    threads: threads_of("reward")
    resources:
        **resources_of("reward"),
    params:
        spec=spec_file,
        program=program("train_reward"),
        placement=placement_json("reward"),
    message:
        "Training reward model {wildcards.name}"


use rule train_sft as evaluate_reward with:
    input:
        unpack(inputs("evaluate_reward")),
    output:
        "output/eval/reward/{name}.manifest.json",
    log:
        "output/logs/evaluate_reward/{name}.log",
    threads: threads_of("reward", work="evaluation")
    resources:
        **resources_of("reward", work="evaluation"),
    params:
        spec=spec_file,
        program=program("evaluate_reward"),
        placement=placement_json("reward", work="evaluation"),
    message:
        "Evaluating reward model {wildcards.name}"


rule reward:
    input:
        unpack(results_of("reward", "train_reward", "evaluate_reward")),
        ancient("output/report/reward/{name}"),
    output:
        directory("output/reward/{name}"),
