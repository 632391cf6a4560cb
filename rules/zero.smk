# A few steps of a recipe at each ZeRO stage, and a page that compares them.


rule compare_zero:
    input:
        unpack(inputs("compare_zero")),
    output:
        "output/zero_runs/{stage}/{name}.manifest.json",
    log:
        "output/logs/compare_zero/{stage}/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of("compare_zero")
    resources:
        **resources_of("compare_zero"),
    params:
        **params_of("compare_zero"),
    message:
        "Training {wildcards.stage}/{wildcards.name} for a few steps at each ZeRO stage"
    shell:
        RUN


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
        "../envs/snakechat.yaml"
    params:
        **params_of("draw_zero"),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Drawing the ZeRO stages of {wildcards.stage}/{wildcards.name}"
    shell:
        f"{RUN} && cp {{params.result:q}}/zero.html{TO_PAGE}"
