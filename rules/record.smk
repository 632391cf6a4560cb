# Training records: a page for each recipe.


SPECS.describe(
    "write_record",
    folder="record",
    settings=lambda stage, name: {"language": config["language"]},
    inputs=lambda stage, name: {
        "tokens": (f"tokenize_{stage}", name),
        "training": (f"train_{stage}", name),
        "evaluation": (f"evaluate_{stage}", name),
    },
    shows_provenance=True,
)


rule write_record:
    input:
        unpack(inputs("write_record")),
    output:
        manifest="output/record/{stage}/{name}.manifest.json",
        page=report(
            "output/record/{stage}/{name}.html",
            caption="captions/page.rst",
            category=MORE,
            subcategory="training records",
            labels={"recipe": "{stage}/{name}"},
        ),
    log:
        "output/logs/write_record/{stage}/{name}.log",
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        spec=spec_file,
        program=program("write_record"),
        placement=COMMON_PLACEMENT_JSON,
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Writing the training record of {wildcards.stage}/{wildcards.name}"
    shell:
        f"{RUN} && cp {{params.result:q}}/record.html{TO_PAGE}"
