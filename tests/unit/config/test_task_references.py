"""Files that task files of lm-evaluation-harness refer to."""

import pytest

from snakechat.config.task_references import referenced_files
from snakechat.workflow.errors import InputError

FILES = {
    "tasks/mine.yaml": """\
include: [base/common.yaml, other.yaml]
task: mine
dataset_path: json
dataset_kwargs:
  data_files:
    train: data/train-*.jsonl
    test: data/test.jsonl
process_docs: !function tools.process
doc_to_target: !function library.module.function
doc_to_text: "Question: {{question}}\\nAnswer:"
""",
    "tasks/other.yaml": "task: other\n",
    "tasks/unused.yaml": "task: unused\n",
    "tasks/base/common.yaml": "include: deep.yaml\ndescription: no.txt\n",
    "tasks/base/deep.yaml": "dataset_path: sets/mine\ntest_split: test\n",
    "tasks/tools.py": "import json\nfrom helpers import words\n\n\ndef process(rows):\n"
    "    return words.of(rows, open(__file__.replace('tools.py', 'stop.txt')))\n",
    "tasks/helpers/__init__.py": "",
    "tasks/helpers/words.py": "of = print\n",
    "tasks/helpers/unused.py": "",
    "tasks/stop.txt": "stop",
    "data/train-1.jsonl": "{}",
    "data/train-2.jsonl": "{}",
    "data/test.jsonl": "{}",
    "data/unused.jsonl": "{}",
    "sets/mine/rows.json": "{}",
    "test/unused.txt": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a task and everything that it refers to."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_task_refers_to_included_files_modules_and_datasets(folder):
    found = {path.resolve() for path in referenced_files(folder / "tasks/mine.yaml")}
    assert {path.relative_to(folder).as_posix() for path in found} == {
        name for name in FILES if "unused" not in name
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include: none.yaml", "mine.yaml includes .*none.yaml, which does not exist"),
        ("task: [", "mine.yaml is not valid YAML: while parsing"),
        ("a: !function wrong.f", "wrong.py is not valid Python: .* was never closed"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_in_one_line(folder, text, message):
    (folder / "tasks/mine.yaml").write_text(f"{text}\n")
    (folder / "tasks/wrong.py").write_text("def f(\n    a b\n")
    with pytest.raises(InputError, match=message) as error:
        referenced_files(folder / "tasks/mine.yaml")
    assert "\n" not in str(error.value)


def test_files_that_include_each_other_end(folder):
    (folder / "tasks/other.yaml").write_text("include: mine.yaml\n")
    assert folder / "tasks/other.yaml" in referenced_files(folder / "tasks/mine.yaml")
