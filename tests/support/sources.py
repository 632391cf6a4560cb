"""Small programs and their packages."""


def write_sources(root, files):
    """Write files, by path, under a folder and return the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
