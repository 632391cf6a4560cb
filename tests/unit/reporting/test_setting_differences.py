"""Settings that differ between trainings: their own, and the settings of earlier jobs."""

from snakechat.reporting.setting_differences import comparable_settings, setting_differences


def job(path, settings, *inputs, files=0):
    """A job of a lineage."""
    rule, name = path.split("/")
    files = {"number": files, "digest": "0123456789abcdef"}
    entry = {"rule": rule, "name": name, "settings": settings, "inputs": inputs, "files": files}
    return path, entry


def differences(*lineages):
    """The differences between trainings, the first jobs of lineages."""
    return setting_differences(
        [comparable_settings(lineage, next(iter(lineage))) for lineage in lineages]
    )


def rlhf(actor, actor_epochs, reward_epochs=1):
    """RLHF from sft/ACTOR with a reward model, which was trained from sft/tiny."""
    return dict(
        [
            job(
                "train_rlhf/a",
                {"actor": actor, "seed": actor_epochs},
                f"train_sft/{actor}",
                "train_reward/tiny",
                "tokenize_rlhf/a",
            ),
            job("train_reward/tiny", {"epochs": reward_epochs}, "train_sft/tiny"),
            job("train_sft/tiny", {"epochs": 1}, "init_model/tiny"),
            job(f"train_sft/{actor}", {"epochs": actor_epochs}, "init_model/tiny"),
            job("tokenize_rlhf/a", {"actor": actor, "seed": actor_epochs}),
            job("init_model/tiny", {"seed": 1}),
        ]
    )


def test_earlier_jobs_are_matched_by_rule_and_not_by_name():
    assert differences(rlhf("mine", 3), rlhf("tiny", 1)) == {
        "actor": ["mine", "tiny"],
        "train_sft: epochs": [[3, 1], 1],
    }


def test_equal_changes_of_several_jobs_are_one_row():
    assert differences(rlhf("tiny", 1), rlhf("tiny", 2, reward_epochs=2)) == {
        "train_sft: epochs": [1, 2]
    }


def dpo(dataset, rows):
    """DPO on a dataset."""
    return dict(
        [
            job("train_dpo/a", {}, "tokenize_dpo/a"),
            job("tokenize_dpo/a", {}, f"import_dataset/{dataset}"),
            job(f"import_dataset/{dataset}", {"rows": rows}, files=rows),
        ]
    )


def test_datasets_are_compared_by_name():
    assert differences(dpo("d", 0), dpo("d", 1)) == {
        "import_dataset d: rows": [0, 1],
        "import_dataset d: files": ["", "0123456789ab"],
    }
    # The settings of another dataset say no more than its name.
    assert differences(dpo("d", 0), dpo("e", 1)) == {}
