# What a training was like: a page of Markdown for each recipe, in words, tables and a picture.


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
        "../envs/rlhf.yaml"
    params:
        program=program("write_record"),
        result=subpath(output.page, strip_suffix=".md"),
    message:
        "Writing the training record of {wildcards.stage}/{wildcards.name}"
    # Beside the result its picture has another path.
    shell:
        "python {params.program:q} --spec {input.spec} 2>&1 | (trap '' INT TERM; tee {log}) &&"
        " sed 's|](loss.svg)|]({wildcards.name}/loss.svg)|' {params.result}/record.md > {output.page}"
