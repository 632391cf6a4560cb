# Recipes of a stage side by side, on one page: A-vs-B, or all of a sweep.


rule compare_runs:
    input:
        unpack(inputs("compare_runs")),
    output:
        manifest="output/compare/{stage}/{name}.manifest.json",
        page=report(
            "output/compare/{stage}/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="recipes compared",
            labels={"recipes": "{stage}/{name}"},
        ),
    log:
        "output/logs/compare_runs/{stage}/{name}.log",
    localrule: True
    conda:
        "../envs/rlhf.yaml"
    params:
        program=program("compare_runs"),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Comparing {wildcards.stage}: {wildcards.name}"
    shell:
        "python {params.program:q} --spec {input.spec} 2>&1 | (trap '' INT TERM; tee {log}) &&"
        " cp {params.result}/comparison.html {output.page}"
