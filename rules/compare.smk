# Recipes of a stage compared on one page: A-vs-B, or all recipes of a sweep. A and B may be versions
# in the store, NAME@KEY.


rule compare_runs:
    input:
        unpack(inputs("compare_runs")),
    output:
        manifest="output/compare/{stage}/{name}.manifest.json",
        page=report(
            "output/compare/{stage}/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="comparisons of recipes",
            labels={"recipes": "{stage}/{name}"},
        ),
    log:
        "output/logs/compare_runs/{stage}/{name}.log",
    wildcard_constraints:
        name=COMPARISON_NAME.pattern,
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        **params_of("compare_runs"),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Comparing {wildcards.stage}: {wildcards.name}"
    shell:
        f"{RUN} && {TO_RESULT}/comparison.html {{output.page:q}}"
