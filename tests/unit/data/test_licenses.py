"""The sources that have a licence."""

from snakechat.data.cards import source_licenses


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
