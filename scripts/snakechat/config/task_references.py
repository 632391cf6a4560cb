"""What task files of lm-evaluation-harness refer to: other task files, Python modules, datasets."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from snakechat.workflow.errors import InputError

# Keys whose values may be folders or patterns, as `datasets` reads them.
DATASET_KEYS = ("dataset_path", "data_dir", "data_files")
# A longer text is no path.
MAX_PATH_LENGTH = 1024


def referenced_files(task: Path) -> set[Path]:
    """Return a task file and all files that it and the files among them refer to.

    These are included task files, modules with functions (`!function module.name`), modules and
    files that those name, and files of datasets. lm_eval looks for them in the folder of the file
    or, if they are data, in the working directory.

    Raises:
        InputError: A file is not YAML or not Python, or an included file does not exist.
    """
    found: set[Path] = set()
    pending = [task]
    while pending:
        path = Path(os.path.normpath(pending.pop()))
        if path in found:
            continue
        found.add(path)
        try:
            if path.suffix in (".yaml", ".yml"):
                pending += _files_of_yaml(path)
            elif path.suffix == ".py":
                pending += _files_of_python(path)
        except FileNotFoundError:
            raise InputError(f"{task} includes {path}, which does not exist") from None
        except (yaml.YAMLError, SyntaxError, ValueError) as error:
            kind = "Python" if path.suffix == ".py" else "YAML"
            line = " ".join(str(error).split())
            raise InputError(f"{path} is not valid {kind}: {line}") from None
    return found


def _files_of_yaml(path: Path) -> Iterator[Path]:
    with path.open(encoding="utf-8") as file:
        document = yaml.compose(file, yaml.SafeLoader)
    for key, node in _scalars(document, ""):
        text = node.value
        if node.tag == "!function":
            module = path.parent / f"{text.rpartition('.')[0].replace('.', '/')}.py"
            # Otherwise it is a module of a library.
            if module.is_file():
                yield module
        elif key == "include":
            yield path.parent / text
        else:
            yield from _existing(text, path.parent, key in DATASET_KEYS)


def _scalars(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yield the scalars of a document, each with the innermost of these keys around it, if any."""
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item, key)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            inner = name.value if name.value in ("include", *DATASET_KEYS) else key
            yield from _scalars(value, inner)


def _files_of_python(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module or ''}.{a.name}" for a in node.names)]
        for name in names:
            module = path.parent.joinpath(*filter(None, name.split(".")))
            files = (module.with_name(f"{module.name}.py"), module / "__init__.py")
            yield from filter(Path.is_file, files)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _existing(node.value, path.parent, False)


def _existing(text: str, folder: Path, is_dataset: bool) -> Iterator[Path]:
    """Yield the files that a text names, below a folder or the working directory."""
    if not text or len(text) > MAX_PATH_LENGTH or "\0" in text or "\n" in text:
        return
    for base in (folder, Path()):
        path = base / text
        if path.is_file():
            yield path
        elif is_dataset and path.is_dir():
            yield from (file for file in path.rglob("*") if file.is_file())
        elif is_dataset and re.search(r"[*?\[]", text) and not path.is_absolute():
            yield from (file for file in base.glob(text) if file.is_file())
