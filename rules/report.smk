# The report of a recipe's three stages, for `snakemake --report`.


report: "captions/workflow.rst"


# Where each file of a report stands: its chapter, and its name there. Snakemake sorts both.
CHAPTERS = {
    "results.html": ("1 Results", "1 all results"),
    "wins.svg": ("1 Results", "2 wins and lengths"),
    "figures.csv": ("1 Results", "3 all figures, to download"),
    "data.svg": ("2 Data", "1 rows, lengths, repetitions"),
    "data.csv": ("2 Data", "2 all figures, to download"),
    "sft.svg": ("3 SFT", "curves"),
    "reward.svg": ("4 Reward model", "1 curves"),
    "calibration.svg": ("4 Reward model", "2 calibration"),
    "rlhf.svg": ("5 RLHF", "curves"),
    "responses.html": ("6 Responses", "side by side"),
    "lineage.svg": ("7 Origins", "lineage"),
    "costs.html": ("8 Costs", "1 time, memory, software"),
    "costs.svg": ("8 Costs", "2 time and memory"),
    "throughput.svg": ("8 Costs", "3 throughput"),
}
# The chapter of other pages that were built.
MORE = "9 More pages"


rule draw_report:
    input:
        unpack(inputs("draw_report")),
    output:
        "output/report/{name}.manifest.json",
    log:
        "output/logs/draw_report/{name}.log",
    localrule: True
    conda:
        "../envs/rlhf.yaml"
    params:
        program=program("draw_report"),
    message:
        "Drawing the figures of {wildcards.name}"
    shell:
        "python {params.program:q} --spec {input.spec}" " 2>&1 | (trap '' INT TERM; tee {log})"


rule report:
    input:
        unpack(asked("report", "draw_report")),
    output:
        report(
            directory("output/report/{name}"),
            patterns=[r"{file,[^/]+\.(html|svg|csv)}"],
            caption="captions/figure.rst",
            category=lambda wildcards: CHAPTERS[wildcards.file][0],
            subcategory="{name}",
            labels=lambda wildcards: {"figure": CHAPTERS[wildcards.file][1]},
        ),
