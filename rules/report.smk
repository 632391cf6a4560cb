# The figures and tables of an RLHF recipe and its stages, for `snakemake --report`.


report: "captions/workflow.rst"


# Chapter and label of each file of a report. Snakemake sorts by both. A recipe without a reward model
# lacks the last files of a chapter only, so that the numbers have no gaps. Only RLHF from a plain
# model has no SFT model.
CHAPTERS = {
    "results.html": ("1 Results", "1 all results"),
    "wins.svg": ("1 Results", "2 win rates and lengths"),
    "metrics.csv": ("1 Results", "3 all metrics (CSV)"),
    "data.svg": ("2 Data", "1 rows, lengths, repetitions"),
    "data.csv": ("2 Data", "2 all statistics (CSV)"),
    "sft.svg": ("3 Training", "1 SFT"),
    "dpo.svg": ("3 Training", "1 SFT, then DPO"),
    "rlhf.svg": ("3 Training", "2 RLHF"),
    "reward.svg": ("3 Training", "3 reward model"),
    "calibration.svg": ("3 Training", "4 calibration of the reward model"),
    "responses.html": ("4 Responses", "side by side"),
    "lineage.svg": ("5 Lineage", "all jobs"),
    "costs.html": ("6 Costs", "1 time, memory, software"),
    "costs.svg": ("6 Costs", "2 time and memory by job"),
    "costs_throughput.svg": ("6 Costs", "3 throughput"),
}
# The chapter of all other pages, the last one in the order of names.
MORE = "More pages"


SPECS.describe(
    "draw_report",
    folder="report",
    settings=lambda _: {},
    inputs=lambda name: report_inputs(CONFIG, name),
    shows_provenance=True,
)


rule draw_report:
    input:
        unpack(inputs("draw_report")),
    output:
        "output/report/{name}.manifest.json",
    log:
        "output/logs/draw_report/{name}.log",
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        program=program("draw_report"),
        placement=CACHE_JSON,
    message:
        "Drawing the report of {wildcards.name}"
    shell:
        RUN


rule report:
    input:
        unpack(results_of("report", "draw_report")),
    output:
        report(
            directory("output/report/{name}"),
            patterns=[r"{file,[^/]+\.(html|svg|csv)}"],
            caption="captions/figure.rst",
            category=lambda wildcards: CHAPTERS[wildcards.file][0],
            subcategory="{name}",
            labels=lambda wildcards: {"figure": CHAPTERS[wildcards.file][1]},
        ),
