"""Identifiers of licences, and the sources that have one."""

from snakechat.data.licenses import is_hub_license, source_licenses


def test_licences_that_the_hub_takes():
    assert is_hub_license("apache-2.0") and is_hub_license("llama3.2")
    assert not is_hub_license("opt-175b") and not is_hub_license("#")


def test_sources_are_what_the_build_does_not_generate():
    lineage = {
        "output/data/toy": ("import_dataset", {"generate": "shop"}, {}),
        "output/data/far": ("import_dataset", {"hub": "a/b"}, {"licence": "mit"}),
        "output/models/base": ("fetch_model", {"hub": "a/c"}, {"licence": "opt"}),
        "output/models/tiny": ("init_model", {}, {}),
    }
    keys = ("rule", "settings", "facts")
    jobs = {path: dict(zip(keys, job, strict=True)) for path, job in lineage.items()}
    declared = {"output/models/base": "mit", "output/data/other": "mit"}
    expected = {"output/data/far": "mit", "output/models/base": "mit"}
    assert source_licenses(jobs, declared) == expected
