# The figures and tables of a recipe and of the stages before it, for `snakemake --report`.


report: "captions/workflow.rst"


# Chapter and label of each file of a report. Snakemake sorts by both. Only reports of RLHF have the
# last chapter, so that the numbers have no gaps.
CHAPTERS = {
    "results.html": ("1 Results", "1 all results"),
    "metrics.csv": ("1 Results", "2 all metrics (CSV)"),
    "data.html": ("2 Data", "1 rows, lengths, repeated prompts"),
    "data.csv": ("2 Data", "2 all statistics (CSV)"),
    "training.html": ("3 Training", "curves"),
    "lineage.html": ("4 Lineage", "all jobs"),
    "costs.html": ("5 Costs", "time, memory, throughput, software"),
    "responses.html": ("6 Responses", "side by side"),
}
# The chapter of all other pages, the last one in the order of names.
MORE = "More pages"


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
            patterns=["{file," + "|".join(map(re.escape, CHAPTERS)) + "}"],
            caption="captions/figure.rst",
            category=lambda wildcards: CHAPTERS[wildcards.file][0],
            subcategory="{stage}/{name}",
            labels=lambda wildcards: {"figure": CHAPTERS[wildcards.file][1]},
        ),
