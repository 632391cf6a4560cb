# Recipes of a stage compared on one page: A-vs-B, or all recipes of a sweep. A and B may be versions
# in the cache, NAME@KEY.


SPECS.describe(
    "compare_runs",
    folder="compare",
    settings=lambda stage, names: {
        "language": config["language"],
        "recipes": CONFIG.compared_recipes(stage, names),
        "swept": CONFIG.compared_values(stage, names),
    },
    inputs=lambda stage, names: {
        f"{result}.{recipe}": (f"{verb}_{stage}", recipe)
        for result, verb in (("training", "train"), ("evaluation", "evaluate"))
        for recipe in CONFIG.compared_recipes(stage, names)
        if not is_version(recipe)
    },
    files=lambda stage, names: {
        f"{recipe}/{file}": path
        for recipe, version in CONFIG.compared_versions(stage, names).items()
        for file, path in version.files().items()
    },
    shows_provenance=True,
)


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
        spec=spec_file,
        program=program("compare_runs"),
        placement=versions_json,
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Comparing {wildcards.stage}: {wildcards.name}"
    shell:
        f"{RUN} && cp {{params.result:q}}/comparison.html{TO_PAGE}"
