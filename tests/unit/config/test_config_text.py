"""The text of config files: keys that are written twice, and files that are not YAML."""

import pytest

from snakechat.config.loading import check_config_text
from snakechat.config.schema import ConfigError

# Each of these lines has ten times the values of the line before.
NESTED_MERGES = b"a0: &a0 {k: 1}\n" + b"".join(
    b"a%d: &a%d {<<: [%b]}\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10)
)


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
        (b"seed: 2026-13-01", "x.yaml: a value cannot be read: month must be in 1..12"),
        (b"seed: !!python/name:os.system x", "x.yaml: line 1 is not YAML: could not"),
        (b"a: &x {b: *x}\n", "x.yaml: a value cannot be read: an alias contains itself: remove it"),
        (b"a: " + b"[" * 100_000, "values are nested in more than 100 levels"),
        (b"a: 1" + b":1" * 600, "a number has 1,201 digits, at most 20"),
        (b"a: 0." + b"1" * 2000, "a number has 2,002 digits, at most 1,000"),
        (b"a: !!timestamp x\n", "x.yaml: a value cannot be read: "),
        (b"a: !!int ''\n", "x.yaml: a value cannot be read: "),
        (b'sft: {recipes: {a: {command: "a\\0"}}}\n', "recipes.a.command has the character NUL"),
        (NESTED_MERGES, "aliases and merges (*NAME) repeat more than 100,000 values: remove some"),
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
