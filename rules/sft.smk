# Supervised fine-tuning on the chosen responses. The rules of the other stages derive from these.


SPECS.describe(
    "tokenize_sft",
    folder="tokens/sft",
    program="tokenize_phase",
    settings=lambda name: tokenization_settings(CONFIG, "sft", name, "max_length"),
    inputs=lambda name: tokenization_inputs(CONFIG, "sft", name),
)
SPECS.describe(
    "train_sft",
    folder="sft",
    settings=lambda name: CONFIG.program_settings("sft", name),
    inputs=lambda name: {
        "model": CONFIG.base_model("sft", name),
        "tokens": ("tokenize_sft", name),
    },
    runs_models=True,
)
SPECS.describe(
    "evaluate_sft",
    folder="eval/sft",
    settings=lambda name: {
        "dtype": CONFIG.recipe("sft", name)["dtype"],
        "datasets": held_out_datasets(CONFIG, "sft", name),
    },
    inputs=lambda name: {
        "base": CONFIG.base_model("sft", name),
        "model": ("train_sft", name),
        "tokens": ("tokenize_sft", name),
    },
    runs_models=True,
)


rule tokenize_sft:
    input:
        unpack(inputs("tokenize_sft")),
    output:
        "output/tokens/sft/{name}.manifest.json",
    log:
        "output/logs/tokenize_sft/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("sft")
    params:
        spec=spec_file,
        program=program("tokenize_phase"),
        placement=COMMON_PLACEMENT_JSON,
    message:
        "Tokenizing the SFT phase for {wildcards.name}"
    shell:
        f"RAYON_NUM_THREADS={{threads}} {RUN}"


rule train_sft:
    input:
        unpack(inputs("train_sft")),
    output:
        "output/sft/{name}.manifest.json",
    log:
        "output/logs/train_sft/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("sft")
    resources:
        **resources_of("sft"),
    params:
        spec=spec_file,
        program=program("train_sft"),
        placement=placement_json("sft"),
    message:
        "Fine-tuning {wildcards.name}"
    shell:
        RUN


use rule train_sft as evaluate_sft with:
    input:
        unpack(inputs("evaluate_sft")),
    output:
        "output/eval/sft/{name}.manifest.json",
    log:
        "output/logs/evaluate_sft/{name}.log",
    threads: threads_of("sft", work="evaluation")
    resources:
        **resources_of("sft", work="evaluation"),
    params:
        spec=spec_file,
        program=program("evaluate_sft"),
        placement=placement_json("sft", work="evaluation"),
    message:
        "Evaluating SFT model {wildcards.name}"


# The folder that users ask for. train_sft writes it: a rule without a command leaves the folder
# alone, while Snakemake deletes the old output of a rule with one before it starts.
rule sft:
    input:
        unpack(results_of("sft", "train_sft", "evaluate_sft")),
        ancient("output/report/sft/{name}"),
    output:
        directory("output/sft/{name}"),
