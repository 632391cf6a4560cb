"""Conflicts and duties that follow from licences."""

import pytest

from snakechat.data.licenses import (
    TEXTS,
    conditions_of,
    license_remarks,
    normalized_license,
    source_licenses,
)


def remarks(name="mine", /, **sources):
    """Return {kind: values} of the remarks on sources."""
    return {remark.kind: remark.values for remark in license_remarks(sources, name)}


def test_permissive_licenses_have_no_remarks():
    assert remarks(a="mit", b="apache-2.0", c="cc-by-4.0", d="odc-by") == {}


def test_data_without_commercial_use():
    assert remarks(a="cc-by-nc-4.0", b="mit") == {"non_commercial": {"sources": "a (cc-by-nc-4.0)"}}
    assert remarks(a="cc-by-nc-nd-4.0").keys() == {"non_commercial", "no_derivatives"}


def test_a_base_model_that_asks_for_its_name():
    found = remarks("tiny", base="llama3.2", data="mit")
    assert found == {
        "name": {"sources": "base (llama3.2)", "prefix": "Llama"},
        "notice": {"sources": "base (llama3.2)", "notice": "Built with Llama"},
    }
    assert remarks("Llama-3.2-mine", base="llama3.2").keys() == {"notice"}
    assert remarks("Llama-mine", base="llama3").keys() == {"name", "notice"}
    assert remarks("llama-3-mine", base="llama3").keys() == {"notice"}


@pytest.mark.parametrize(
    ("licenses", "others"),
    [
        (("cc-by-sa-4.0", "cc-by-4.0"), None),
        (("cc-by-sa-4.0", "cc-by-sa-4.0"), None),
        # Version 4 of CC BY-SA may become version 3 of the GPL.
        (("cc-by-sa-4.0", "gpl-3.0"), None),
        (("gpl-3.0", "gpl-3.0-or-later"), None),
        (("cc-by-sa-4.0", "cc-by-nc-4.0"), "b (cc-by-nc-4.0)"),
        (("cc-by-nc-sa-4.0", "cc-by-nc-4.0"), None),
        (("cc-by-nc-sa-4.0", "cc-by-sa-4.0"), "b (cc-by-sa-4.0)"),
        (("cc-by-sa-4.0", "gemma"), "b (gemma)"),
        (("cc-by-sa-4.0", "cc-by-nd-4.0"), "b (cc-by-nd-4.0)"),
        (("agpl-3.0", "cdla-sharing-1.0"), "b (cdla-sharing-1.0)"),
    ],
)
def test_share_alike(licenses, others):
    found = remarks(a=licenses[0], b=licenses[1]).get("share_alike")
    assert found == (others and {"sources": f"a ({licenses[0]})", "others": others})


def test_a_license_that_nobody_stated():
    assert remarks(a=None, b="other", c="mit") == {"unknown": {"sources": "a, b (other)"}}


def test_only_duties_that_cannot_be_checked_are_no_conflicts():
    sources = {"a": None, "b": "llama4", "c": "cc-by-nc-sa-4.0", "d": "cc-by-nd-4.0"}
    found = license_remarks(sources, "mine")
    assert {remark.kind for remark in found} == set(TEXTS)
    assert {remark.kind for remark in found if not remark.is_conflict} == {"notice"}
    assert all("{" not in remark.text() for remark in found)


def test_identifiers_of_spdx_are_those_of_the_hub():
    assert normalized_license("CC-BY-NC-4.0") == "cc-by-nc-4.0"
    assert normalized_license("mit | [x](http://x)") is None
    assert normalized_license(["mit"]) is None
    assert conditions_of("openrail++").restricted


def test_sources_are_what_the_build_does_not_generate():
    lineage = {
        "output/data/toy": ("import_dataset", {"generate": "shop"}, {}),
        "output/data/far": ("import_dataset", {"hub": "a/b"}, {"licence": "mit"}),
        "output/models/base": ("fetch_model", {"hub": "a/c"}, {"licence": "opt"}),
        "output/models/tiny": ("init_model", {}, {}),
    }
    jobs = {
        path: {"rule": rule, "settings": settings, "facts": facts}
        for path, (rule, settings, facts) in lineage.items()
    }
    for job in jobs.values():
        job["inputs"] = []
    declared = {"output/models/base": "mit", "output/data/other": "mit"}
    expected = {"output/data/far": "mit", "output/models/base": "mit"}
    assert source_licenses(jobs, declared) == expected
