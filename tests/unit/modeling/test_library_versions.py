"""Versions of torch and transformers other than the locked ones."""

import pytest
import torch

from snakechat.modeling import library_versions
from snakechat.modeling.compilation import compile_up_to
from snakechat.modeling.library_versions import check_libraries
from snakechat.modeling.models import choose_device
from snakechat.workflow.errors import InputError
from snakechat.workflow.placement import SERIAL

RECENT = {"torch": "2.11.0a0+git1234", "transformers": "6.0.0.dev0"}


def install(monkeypatch, versions):
    """Have the check find these versions."""
    monkeypatch.setattr(library_versions, "installed_versions", lambda _: versions)


@pytest.mark.parametrize("versions", [RECENT, {"torch": "3.0", "transformers": "5.17.0"}])
def test_the_oldest_versions_and_later_ones_are_accepted(versions, monkeypatch):
    install(monkeypatch, versions)
    check_libraries()


@pytest.mark.parametrize(
    ("versions", "line"),
    [
        (
            RECENT | {"torch": "2.9.1+cu130"},
            "torch 2.9.1+cu130 is installed, and Snakechat needs 2.11 or later:"
            " pip install 'torch>=2.11'",
        ),
        (
            {"torch": "2.13.0"},
            "transformers is not installed, and Snakechat needs 5.17 or later:"
            " pip install 'transformers>=5.17'",
        ),
    ],
)
def test_an_older_version_is_an_error_of_one_line(versions, line, monkeypatch):
    install(monkeypatch, versions)
    with pytest.raises(InputError) as error:
        choose_device(SERIAL)
    assert str(error.value) == line


def test_the_limit_of_compiled_versions_without_an_argument_for_it(monkeypatch):
    """As in torch 2.11: the limit of the process grows, and never shrinks."""
    calls = []

    def compile_without_limit(model=None, *, fullgraph=False):
        calls.append((model, fullgraph))
        return model

    monkeypatch.setattr(torch, "compile", compile_without_limit)
    monkeypatch.setattr(torch.compiler.config, "recompile_limit", 8)
    for limit in (64, 16):
        assert compile_up_to(limit, len, fullgraph=True) is len
        assert torch.compiler.config.recompile_limit == 64
    assert calls == [(len, True)] * 2
