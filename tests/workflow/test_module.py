"""Snakechat as a part of another workflow."""

from conftest import ROOT, Workflow

MODULE = f"""
module snakechat:
    snakefile: "{ROOT}/Snakefile"
    config: {{}}

use rule * from snakechat as snakechat_*
"""
RULES = f"""
rule count:
    input:
        "chat/output/data/toy.manifest.json",
    output:
        "files.txt",
    shell:
        "ls chat/output/data/toy > {{output}}"


rule chat_data:
    output:
        "chat/output/data/toy.manifest.json",
    threads: 2
    shell:
        "snakemake --snakefile {ROOT}/Snakefile --directory chat --cores {{threads}}"
        " output/data/toy"
"""


def test_a_module_is_refused_with_the_reason(tmp_path):
    (tmp_path / "Snakefile").write_text(MODULE)
    process = Workflow(tmp_path).run("snakemake", "-n")
    assert process.returncode == 1
    assert "error: Snakechat cannot be a module" in process.stdout
    assert "Traceback" not in process.stdout


def test_a_rule_runs_a_build_in_a_folder_of_its_own(tmp_path):
    (tmp_path / "Snakefile").write_text(RULES)
    workflow = Workflow(tmp_path)
    workflow.build()
    assert "train.parquet" in (workflow.folder / "files.txt").read_text()
    assert "Nothing to be done" in workflow.run("snakemake", "-n").stdout
