"""The lineage of an RLHF model from data of each kind: of the Hub, of local files, generated."""

from snakechat.workflow.digests import digest


def entry(rule, name, settings, inputs=(), files=0, **facts):
    """Return the entry of a job."""
    return {
        "rule": rule,
        "name": name,
        "settings": settings,
        "facts": facts,
        "files": {"number": files, "digest": digest(name)},
        "spec": digest([rule, name]),
        "content": digest([name, rule]),
        "inputs": sorted(inputs),
    }


def split_of(name, excluded=(), **phases):
    """Return the entry of the split of a dataset."""
    facts = {"phases": phases} | ({"excluded": list(excluded)} if excluded else {})
    return entry("split_dataset", name, {"by": "row"}, [f"output/data/{name}"], **facts)


PHASES = {
    "sft.train": {"rows": 15_252, "rows_whose_prompt_is_in": {"reward.train": 131}},
    "reward.train": {"rows": 30_502, "rows_whose_prompt_is_in": {"sft.train": 131}},
    "rlhf.train": {"rows": 0},
}
SIZE = {
    "train": {"rows": 76_256, "characters": 63_000_000},
    "eval": {"rows": 5103, "characters": 4_200_000},
}
COMMIT = "09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa"
LINEAGE = {
    "output/data/public": entry(
        "import_dataset",
        "public",
        {"hub": "lab/public", "revision": "main"},
        commit=COMMIT,
        licence="cc-by-nc-4.0",
        languages=["en", "zh"],
        dropped={"train": {"tie": 12, "bad row": 1}, "eval": {"tie": 3}},
        size=SIZE,
    ),
    "output/data/mine": entry(
        "import_dataset",
        "mine",
        {"format": "plain"},
        files=3,
        licence=None,
        dropped={"train": {}},
        size={"train": {"rows": 50, "characters": 1234}},
    ),
    "output/data/toy": entry(
        "import_dataset",
        "toy",
        {"generate": "shop", "seed": 7},
        dropped={"train": {}, "eval": {}},
        size={"train": {"rows": 600, "characters": 70_000}},
    ),
    "output/data/picked": entry(
        "select_responses", "picked", {"select": "best"}, ["output/scores/tiny"]
    ),
    "output/scores/tiny": entry("score_responses", "tiny", {}),
    "output/split/public": split_of("public", excluded=["ab", "cd"], **PHASES),
    "output/split/mine": split_of("mine", **{"sft.train": {"rows": 45}}),
    "output/models/base": entry(
        "fetch_model",
        "base",
        {"hub": "lab/base", "revision": "main"},
        commit=COMMIT,
        licence="llama3.2",
    ),
    "output/tokens/sft/mine": entry(
        "tokenize_sft",
        "mine",
        {},
        [
            "output/data/mine",
            "output/data/public",
            "output/split/mine",
            "output/split/public",
            "output/models/base",
        ],
    ),
    "output/sft/mine": entry(
        "train_sft", "mine", {"seed": 1}, ["output/models/base", "output/tokens/sft/mine"]
    ),
}
