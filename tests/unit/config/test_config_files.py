"""The text of config files: keys that are written twice, and files that are not YAML."""

import pytest

from snakechat.config.config_files import check_config_text
from snakechat.config.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"seed: 1\nsft: {}\nseed: 2\n", "x.yaml: seed is written twice, in lines 1 and 3: keep"),
        (b"sft:\n  recipes:\n    a: {epochs: 1, epochs: 2}\n", "sft.recipes.a.epochs is written"),
        (b"sft:\n\trecipes: {}\n", "x.yaml: line 2 is indented with a tab: use spaces"),
        (b"a: [1\nb: 2\n", "x.yaml: line 2 is not YAML: "),
        (
            "sft:\n  model\uff1aa\n  datasets: [b]\n".encode(),
            "before it (line 2 has the full-width character '\uff1a')",
        ),
        (b"[1]", "x.yaml: expected sections"),
        (b"seed: 1" + b"0" * 5000, "x.yaml: a value cannot be read: Exceeds the limit (4300"),
        (b"seed: !!python/name:os.system x", "x.yaml: line 1 is not YAML: could not"),
        (b"a: &x {b: *x}\n", "x.yaml: an alias contains itself, or values"),
        (b"\xff\xfea", "x.yaml: byte 1 is not UTF-8: save the file as text in UTF-8"),
    ],
)
def test_a_mistake_in_the_text_is_an_error_of_one_line(text, message):
    with pytest.raises(ConfigError) as error:
        check_config_text("x.yaml", text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfseed: 1\n",
        b"a: &x {b: 1}\nc: {<<: *x, b: 2}\n",
    ],
)
def test_other_texts_are_accepted(text):
    check_config_text("x.yaml", text)
