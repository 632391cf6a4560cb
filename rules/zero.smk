# The same few steps of a recipe at each ZeRO stage, and a page that compares them.


rule compare_zero:
    input:
        unpack(inputs("compare_zero")),
    output:
        "output/zero_runs/{stage}/{name}.manifest.json",
    log:
        "output/logs/compare_zero/{stage}/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    threads: threads_of()
    resources:
        **resources_of(),
    params:
        program=program("compare_zero"),
        placement=placement_json(launch=f"python {program('launch')}"),
    message:
        "Training {wildcards.stage}/{wildcards.name} for a few steps at each ZeRO stage"
    shell:
        "python {params.program:q} --spec {input.spec} --placement {params.placement:q}"
        " 2>&1 | (trap '' INT TERM; tee {log})"


rule draw_zero:
    input:
        unpack(inputs("draw_zero")),
    output:
        manifest="output/zero/{stage}/{name}.manifest.json",
        page=report(
            "output/zero/{stage}/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="ZeRO stages",
            labels={"recipe": "{stage}/{name}"},
        ),
    log:
        "output/logs/draw_zero/{stage}/{name}.log",
    localrule: True
    conda:
        "../envs/rlhf.yaml"
    params:
        program=program("draw_zero"),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Drawing the ZeRO stages of {wildcards.stage}/{wildcards.name}"
    shell:
        "python {params.program:q} --spec {input.spec} 2>&1 | (trap '' INT TERM; tee {log}) &&"
        " cp {params.result}/zero.html {output.page}"
