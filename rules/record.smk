# Training records: a page of Markdown for each recipe.


SPECS.describe(
    "write_record",
    folder="record",
    settings=lambda *_: {"language": config["language"]},
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
            "output/record/{stage}/{name}.md",
            caption="captions/page.rst",
            category=MORE,
            subcategory="training records, to download",
            labels={"recipe": "{stage}/{name}"},
        ),
    log:
        "output/logs/write_record/{stage}/{name}.log",
    localrule: True
    conda:
        "../envs/snakechat.yaml"
    params:
        program=program("write_record"),
        placement=CACHE_JSON,
        result=subpath(output.page, strip_suffix=".md"),
    message:
        "Writing the training record of {wildcards.stage}/{wildcards.name}"
    # Next to the result folder, the picture has another relative path.
    shell:
        f"{RUN} && sed 's|](loss.svg)|]({{wildcards.name}}/loss.svg)|'"
        " {params.result}/record.md > {output.page}"
