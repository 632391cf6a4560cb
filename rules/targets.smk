# What is built where no target is named.


def built_targets():
    """Recipes with a result under output/ and their pages, or the tiny one; a chat model stands
    for its parts.
    """
    built = [
        (stage, name)
        for stage in STAGES
        for name in config[stage]["recipes"]
        if Path(f"output/{stage}/{name}.manifest.json").exists()
    ]
    parts = set()
    for stage, name in built:
        if stage == "rlhf":
            settings = recipe(stage, name)
            parts |= {("sft", settings["actor"])}
            parts |= {("reward", settings["reward"]), ("reward", settings["judge"])}
    targets = [f"output/{stage}/{name}" for stage, name in built if (stage, name) not in parts]
    pages = [
        f"output/{folder}/{stage}/{name}.{kind}"
        for stage, name in built
        for folder, kind in (
            ("record", "md"),
            ("zero", "html"),
            ("prompt_eval", "html"),
            ("rw_eval", "html"),
        )
    ]
    targets += [page for page in pages if Path(page).exists()]
    targets += [
        str(page)
        for page in sorted(Path("output/compare").glob("*/*.html"))
        if all(is_known(page.parent.name, name) for name in page.stem.split("-vs-"))
    ]
    return targets or ["output/rlhf/tiny"]


def is_known(stage, name):
    """Whether the config has a recipe or a sweep of this name."""
    return stage in STAGES and (name in config[stage]["recipes"] or name in config["sweeps"])
