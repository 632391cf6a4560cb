# Figures and tables of a recipe's three stages, for `snakemake --report`.


rule draw_report:
    input:
        unpack(inputs("draw_report")),
    output:
        "output/report/{name}.manifest.json",
    log:
        "output/logs/draw_report/{name}.log",
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
            patterns=["{figure}.svg", "{figure}.csv"],
            category="{name}",
            labels={"figure": "{figure}"},
        ),
