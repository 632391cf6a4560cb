"""LLM judges in builds: the API key is checked first."""

import yaml

JUDGE = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind.", "key_env": "JUDGE_KEY"}
DATASETS = {
    "pairs": {"generate": "shop", "rows": 60, "eval_rows": 20},
    "labelled": {"label": "pairs", "llm_judge": "wise"},
}


def test_a_missing_key_stops_the_build_before_its_first_job(sources, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = {"datasets": DATASETS, "llm_judges": {"wise": JUDGE}}
    (sources.folder / "mine.yaml").write_text(yaml.safe_dump(config))
    sources.options = ("--configfile", "mine.yaml")
    process = sources.snakemake("output/data/labelled.manifest.json", "--cores", "1")
    assert process.returncode
    assert (
        "error: llm_judges.wise.key_env: environment variable JUDGE_KEY has no key: export it"
        in process.stdout
    )
    assert not (sources.folder / "output/data/pairs.manifest.json").exists()
