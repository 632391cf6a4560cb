# Figures and tables of a recipe's three stages, for `snakemake --report`.


@job("draw_report", folder="report")
def describe_draw_report(name):
    settings = recipe("rlhf", name)
    return {
        "settings": {},
        "inputs": {
            "train_sft": ("train_sft", settings["actor"]),
            "evaluate_sft": ("evaluate_sft", settings["actor"]),
            "train_reward": ("train_reward", settings["reward"]),
            "evaluate_reward": ("evaluate_reward", settings["reward"]),
            "train_rlhf": ("train_rlhf", name),
            "evaluate_rlhf": ("evaluate_rlhf", name),
        },
    }


rule draw_report:
    message:
        "Drawing the figures of {wildcards.name}"
    input:
        unpack(inputs("draw_report")),
    output:
        "output/report/{name}.manifest.json",
    log:
        "output/logs/draw_report/{name}.log",
    conda:
        "../envs/rlhf.yaml"
    shell:
        "python {ROOT:q}/scripts/draw_report.py --spec {input.spec} 2>&1 | tee {log}"


rule report:
    input:
        ancient("output/report/{name}.manifest.json"),
    output:
        report(
            directory("output/report/{name}"),
            patterns=["{figure}.svg", "{figure}.csv"],
            category="{name}",
            labels={"figure": "{figure}"},
        ),
