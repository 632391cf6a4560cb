# A few steps of a recipe at each ZeRO stage, and a table that compares them.


rule compare_zero:
    input:
        unpack(inputs("compare_zero")),
    output:
        manifest="output/zero/{stage}/{name}.manifest.json",
        page="output/zero/{stage}/{name}.md",
    log:
        "output/logs/compare_zero/{stage}/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("compare_zero")
    resources:
        **resources_of("compare_zero"),
    params:
        **params_of("compare_zero"),
        result=subpath(output.page, strip_suffix=".md"),
    message:
        "Training {wildcards.stage}/{wildcards.name} for a few steps at each ZeRO stage"
    shell:
        f"{RUN} && {TO_RESULT}/zero.md {{output.page:q}}"
