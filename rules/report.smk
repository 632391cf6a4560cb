# A page of each recipe and of the stages before it, with a table of its metrics, for
# `snakemake --report`.


report: "captions/workflow.rst"


# The categories of pages, in the order of their names.
RECIPES, MORE = "Recipes", "Responses and comparisons"


rule draw_report:
    input:
        unpack(inputs("draw_report")),
    output:
        "output/report/{stage}/{name}.manifest.json",
    log:
        "output/logs/draw_report/{stage}/{name}.log",
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        **params_of("draw_report"),
    message:
        "Drawing the report of {wildcards.stage}/{wildcards.name}"
    shell:
        RUN


rule report:
    input:
        unpack(results_of("report", lambda *recipe: [("draw_report", "/".join(recipe))])),
    output:
        report(
            directory("output/report/{stage}/{name}"),
            patterns=["{file,report.html|metrics.csv}"],
            caption="captions/page.rst",
            category=RECIPES,
            subcategory="{stage}/{name}",
            labels={"file": "{file}"},
        ),
