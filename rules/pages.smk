# Pages: of each recipe and of the stages before it, of recipes of a stage compared (A-vs-B, or all
# recipes of a sweep; A and B may be versions in the store, NAME@KEY), of responses to the prompts of
# users, and of pairs of responses scored by a reward model.


report: "captions/workflow.rst"


# The categories of pages, in the order of their names.
RECIPES, MORE = "Recipes", "Responses and comparisons"


use rule job as draw_report with:
    input:
        unpack(inputs("draw_report")),
    output:
        "output/report/{stage}/{name}.manifest.json",
    log:
        "output/logs/draw_report/{stage}/{name}.log",
    localrule: True
    message:
        "Drawing the report of {wildcards.stage}/{wildcards.name}"


rule report:
    input:
        unpack(results_of("report")),
    output:
        report(
            directory("output/report/{stage}/{name}"),
            patterns=["{file,report.html|metrics.csv}"],
            caption="captions/page.rst",
            category=RECIPES,
            subcategory="{stage}/{name}",
            labels={"file": "{file}"},
        ),


rule draw_page:
    input:
        unpack(inputs("draw_page")),
    output:
        manifest="output/pages/{page}/{stage}/{name}.manifest.json",
        page=report(
            "output/{page}/{stage}/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="{page}",
            labels={"recipe": "{stage}/{name}"},
        ),
    log:
        "output/logs/draw_page/{page}/{stage}/{name}.log",
    wildcard_constraints:
        page="compare|prompt_eval|rw_eval",
        name=COMPARISON_NAME.pattern,
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        command=FUNCTIONS.command,
        page="output/pages/{page}/{stage}/{name}/{page}.html",
        folder="output/{page}/{stage}",
    message:
        "Drawing {wildcards.page} of {wildcards.stage}/{wildcards.name}"
    shell:
        # Relative to the real folder: output/ and folders below it may be links.
        RUN + ' && ln -sfn "$(realpath -s --relative-to="$(realpath {params.folder:q})"'
        ' {params.page:q})" {output.page:q}'
