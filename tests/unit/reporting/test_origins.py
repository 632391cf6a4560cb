"""Where the data and models of a lineage come from, as text."""

import pytest

from snakechat.reporting.origins import describe_origin
from snakechat.workflow.digests import digest

ORIGINS = {
    "mine/data @ abc123": {
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123"},
    },
    "mine/data @ abc123, licence mit": {
        "settings": {"hub": "mine/data", "revision": "main"},
        "facts": {"commit": "abc123", "licence": "mit"},
    },
    "3 files, digest 0123456789abcdef": {
        "settings": {"format": "plain"},
        "files": {"number": 3, "digest": "0123456789abcdef" * 4},
    },
    "generated (shop, seed 7)": {"settings": {"generate": "shop", "seed": 7}},
    "random weights (seed 7)": {"settings": {"init": {}, "seed": 7}},
    "": {"settings": {"by": "row", "seed": 7}},
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_origin_of_a_job(origin):
    entry = {"facts": {}, "files": {"number": 0, "digest": digest({})}, **ORIGINS[origin]}
    assert describe_origin(entry, entry["facts"].get("licence")) == origin
