# Training records: a page for each recipe.


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
        **params_of("write_record"),
        result=subpath(output.page, strip_suffix=".html"),
    message:
        "Writing the training record of {wildcards.stage}/{wildcards.name}"
    shell:
        f"{RUN} && {TO_RESULT}/record.html {{output.page:q}}"
