# Direct preference optimization: a chat model from pairs, without a reward model.


SPECS.describe(
    "tokenize_dpo",
    folder="tokens/dpo",
    program="tokenize_phase",
    settings=lambda name: tokenization_settings(CONFIG, "dpo", name, "max_length"),
    inputs=lambda name: tokenization_inputs(CONFIG, "dpo", name),
)
SPECS.describe(
    "compute_reference",
    folder="reference",
    settings=lambda name: reference_settings(CONFIG, name),
    inputs=lambda name: {
        "model": CONFIG.base_model("dpo", name),
        "tokens": ("tokenize_dpo", name),
    },
    runs_models=True,
)
SPECS.describe(
    "train_dpo",
    folder="dpo",
    settings=lambda name: CONFIG.program_settings("dpo", name),
    inputs=lambda name: {
        "model": CONFIG.base_model("dpo", name),
        "tokens": ("tokenize_dpo", name),
        **reference_inputs(CONFIG, name),
    },
    runs_models=True,
)
SPECS.describe(
    "evaluate_dpo",
    folder="eval/dpo",
    settings=lambda name: dpo_evaluation_settings(CONFIG, name),
    inputs=lambda name: dpo_evaluation_inputs(CONFIG, name),
    runs_models=True,
)


use rule tokenize_sft as tokenize_dpo with:
    input:
        unpack(inputs("tokenize_dpo")),
    output:
        "output/tokens/dpo/{name}.manifest.json",
    log:
        "output/logs/tokenize_dpo/{name}.log",
    threads: threads_of("dpo")
    message:
        "Tokenizing pairs for DPO of {wildcards.name}"


use rule train_sft as compute_reference with:
    input:
        unpack(inputs("compute_reference")),
    output:
        "output/reference/{name}.manifest.json",
    log:
        "output/logs/compute_reference/{name}.log",
    threads: threads_of("dpo", work="evaluation")
    resources:
        **resources_of("dpo", work="evaluation"),
    params:
        spec=spec_file,
        program=program("compute_reference"),
        placement=placement_json("dpo", work="evaluation"),
    message:
        "Computing the reference log-probabilities for {wildcards.name}"


use rule train_sft as train_dpo with:
    input:
        unpack(inputs("train_dpo")),
    output:
        "output/dpo/{name}.manifest.json",
    log:
        "output/logs/train_dpo/{name}.log",
    threads: threads_of("dpo")
    resources:
        **resources_of("dpo"),
    params:
        spec=spec_file,
        program=program("train_dpo"),
        placement=placement_json("dpo"),
    message:
        "Training {wildcards.name} by DPO"


use rule train_sft as evaluate_dpo with:
    input:
        unpack(inputs("evaluate_dpo")),
    output:
        "output/eval/dpo/{name}.manifest.json",
    log:
        "output/logs/evaluate_dpo/{name}.log",
    threads: threads_of("dpo", work="evaluation")
    resources:
        **resources_of("dpo", work="evaluation"),
    params:
        spec=spec_file,
        program=program("evaluate_dpo"),
        placement=placement_json("dpo", work="evaluation"),
    message:
        "Evaluating DPO model {wildcards.name}"


rule dpo:
    input:
        unpack(results_of("dpo", "train_dpo", "evaluate_dpo")),
        ancient("output/report/dpo/{name}"),
    output:
        directory("output/dpo/{name}"),
