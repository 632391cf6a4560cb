# Trained models in the formats of inference servers.


SPECS.describe(
    "export_gguf",
    folder="gguf",
    settings=lambda stage, name: config["gguf"],
    inputs=lambda stage, name: {"model": training_job(stage, name)},
)


rule export_gguf:
    input:
        unpack(inputs("export_gguf")),
    output:
        "output/gguf/{stage}/{name}.manifest.json",
    log:
        "output/logs/export_gguf/{stage}/{name}.log",
    wildcard_constraints:
        stage="sft|dpo|rlhf",
    conda:
        "../envs/snakechat.yaml"
    resources:
        # One weight at a time is in memory.
        mem_mb=lambda wildcards, attempt: 8000 * attempt,
    params:
        spec=spec_file,
        program=program("export_gguf"),
        placement=COMMON_PLACEMENT_JSON,
    message:
        "Exporting {wildcards.stage}/{wildcards.name} to GGUF"
    shell:
        RUN


# The folder that users ask for, as in sft.smk.
rule gguf:
    input:
        unpack(results_of("gguf", "export_gguf")),
    output:
        directory("output/gguf/{stage}/{name}"),
    wildcard_constraints:
        stage="sft|dpo|rlhf",
