"""The model card: sources, licences, the run; cards that were edited."""

from huggingface_hub import ModelCard

from snakechat.pages.card import is_sealed, model_card
from snakechat.workflow.manifest import digest


def entry(rule, hub, **facts):
    """An entry of a lineage: a job that downloaded something from the hub."""
    job = {"rule": rule, "settings": {"hub": hub, "revision": "main"}, "spec": digest(hub)}
    files, facts = {"number": 0, "digest": digest({})}, {"commit": rule[0] * 40, **facts}
    return job | {"facts": facts, "files": files, "inputs": []}


SETTINGS = {"seed": 7, "dtype": "bf16", "save_dtype": None}
SIZE = {"train": {"rows": 76_256}, "eval": {"rows": 5103}}
PAIRS = entry("import_dataset", "mine/pairs", size=SIZE)
LINEAGE = {
    "output/models/base": entry("fetch_model", "mine/base", licence="opt"),
    "output/data/pairs": PAIRS,
    # Files without a source on the Hub, and a job whose inputs are jobs alone.
    "output/data/local": PAIRS
    | {"settings": {}, "files": {"number": 3, "digest": "0123456789abcdef" * 4}},
    "output/split/local": PAIRS | {"rule": "split_dataset", "settings": {"seed": 7}},
}


def card_of(rule="train_sft", lineage=LINEAGE, options=(), facts=(), **run):
    """Return the metadata and the text of a card."""
    path = f"output/{rule.removeprefix('train_')}/mine"
    job = {"rule": rule, "settings": SETTINGS, "facts": dict(facts), "spec": digest(SETTINGS)}
    lineage = {path: job | {"inputs": [*lineage]}, **lineage}
    record = {"placement": {"threads": 2}, "options": {"snakemake": options}}
    record |= {"versions": {"peft": "4.5", "torch": "1.2.3+cpu"}, **run}
    text = model_card(path, lineage, record)
    assert f"Spec `{job['spec']}`, seed 7." in text and "\n\n\n" not in text
    return ModelCard(text, ignore_metadata_errors=False).data, text


def test_a_card_names_its_sources_and_how_to_use_the_model():
    data, text = card_of()
    assert data.to_dict() == {
        "library_name": "transformers",
        "tags": ["snakechat", "sft"],
        "base_model": ["mine/base"],
        "datasets": ["mine/pairs"],
        "license": "opt",
        "pipeline_tag": "text-generation",
    }
    rows = "train 76,256, eval 5,103"
    for line in (
        f"| mine/base @ {'f' * 40}, licence opt |  | {digest('mine/base')[:16]} |",
        f"| output/data/pairs | mine/pairs @ {'i' * 40} | {rows} |",
        f"| output/data/local | 3 files, digest 0123456789abcdef | {rows} |",
        f"| output/split/local |  | {rows} |",
        "`python scripts/chat.py output/sft/mine`",
        '\n "seed": 7',
    ):
        assert line in text
    assert "chat.py" not in card_of("train_reward")[1]


def test_base_models_with_different_licences_have_none_in_common():
    lineage = LINEAGE | {"output/models/other": entry("fetch_model", "mine/other", licence="mit")}
    assert card_of(lineage=lineage)[0].license is None


def test_the_text_of_a_card_is_that_of_its_run():
    _, text = card_of()
    assert "\nsnakemake --cores 1 output/sft/mine\n" in text
    assert "\nSoftware: torch 1.2.3+cpu, peft 4.5. Hardware: CPU, 2 threads" in text
    assert "The kernel did not limit what the training read." in text
    assert "trained weights" not in text and "from step" not in text
    facts = {"changed_weights": 0.0094, "saved_step": 40}
    options, gpus = ["--configfile", "my file.yaml"], {"nodes": 2, "gpus_per_node": 8}
    _, text = card_of(options=options, facts=facts, hermetic=7, placement=gpus)
    assert "Hardware: 16 GPUs." in text and "nothing else (Landlock 7)." in text
    assert "\nsnakemake --cores 1 output/sft/mine --configfile 'my file.yaml'\n" in text
    assert "0.9 % of the trained weights, which are saved in\nbf16, differ from the" in text
    assert "The model is from step 40 of its training." in text


def test_an_edited_card_is_not_taken_for_one_of_a_build():
    _, text = card_of()
    assert is_sealed(text)
    for edited in (text.replace("# mine", "# My model"), f"{text}\nMore.\n", "", "# mine\n"):
        assert not is_sealed(edited)
