# A few steps of a recipe at each ZeRO stage, and a page that compares them.


SPECS.describe(
    "compare_zero",
    folder="zero_runs",
    # The whole spec of the training, including its code.
    settings=lambda stage, name: {
        "steps": config["zero"]["steps"],
        "training": SPECS.spec(f"train_{stage}", name)[0],
    },
    inputs=lambda stage, name: SPECS.inputs(f"train_{stage}", name),
)
SPECS.describe(
    "draw_zero",
    folder="zero",
    settings=lambda *_: {"language": config["language"]},
    inputs=lambda stage, name: {"runs": ("compare_zero", f"{stage}/{name}")},
    shows_provenance=True,
)


rule compare_zero:
    input:
        unpack(inputs("compare_zero")),
    output:
        "output/zero_runs/{stage}/{name}.manifest.json",
    log:
        "output/logs/compare_zero/{stage}/{name}.log",
    conda:
        "../envs/snakechat.yaml"
    threads: threads_of()
    resources:
        **resources_of(),
    params:
        spec=spec_file,
        program=program("compare_zero"),
        placement=placement_json(launch=["python", LAUNCHER]),
    message:
        "Training {wildcards.stage}/{wildcards.name} for a few steps at each ZeRO stage"
    shell:
        RUN


rule draw_zero:
    input:
        unpack(inputs("draw_zero")),
    output:
        manifest="output/zero/{stage}/{name}.manifest.json",
        page=report(
            "output/zero/{stage}/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="ZeRO stages",
            labels={"recipe": "{stage}/{name}"},
        ),
    log:
        "output/logs/draw_zero/{stage}/{name}.log",
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        spec=spec_file,
        program=program("draw_zero"),
        placement=COMMON_PLACEMENT_JSON,
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Drawing the ZeRO stages of {wildcards.stage}/{wildcards.name}"
    shell:
        f"{RUN} && cp {{params.result:q}}/zero.html{TO_PAGE}"
