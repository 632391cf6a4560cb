"""The text of config files: keys that are written twice, and files that are not YAML."""

import pytest

from snakechat.config.config_files import check_config_files, check_config_text
from snakechat.config.errors import ConfigError
from support.configs import ROOT

# A few hundred bytes with a billion values.
ALIASES = "a0: &a0 {b: 1}\n" + "".join(
    f"a{n}: &a{n} {{b: *a{n - 1}, c: *a{n - 1}}}\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"seed: 1\nsft: {}\nseed: 2\n", "x.yaml: seed is written twice, in lines 1 and 3: keep"),
        (b"sft:\n  recipes:\n    a: {epochs: 1, epochs: 2}\n", "sft.recipes.a.epochs is written"),
        (b'a:\n- b: 1\n  "b": 2\n', "a.0.b is written twice, in lines 2 and 3"),
        (b"rlhf:\n  a: 1\nsft: 1\nrlhf:\n  b: 2\n", "rlhf is written twice, in lines 1 and 4"),
        (b'{"seed": 1,\n\t"seed": 2}', "seed is written twice, in lines 1 and 2"),
        (b"a: &x {b: 1, b: 2}\nc: *x\n", "a.b is written twice, in lines 1 and 1"),
        (b"sft:\n\trecipes: {}\n", "x.yaml: line 2 is indented with a tab: use spaces"),
        (b"a: [1\nb: 2\n", "x.yaml: line 2 is not YAML: "),
        (b"a: *b\n", "x.yaml: line 1 is not YAML: found undefined alias"),
        (b"a: \x01\n", "x.yaml: not YAML: "),
        (b"a: &a [*a]\n", "x.yaml: line 1 is in more than 50 mappings and lists, or in itself"),
        (b"a: &a {b: {c: *a}}\n", "x.yaml: line 1 is in more than 50"),
        (b"a: " + b"[" * 100_000, "x.yaml: line 1 is in more than 50"),
        (b"[" * 100_000, "x.yaml: line 1 is in more than 50"),
        (
            ALIASES.encode(),
            "x.yaml: more than 100,000 values, counting those of an alias",
        ),
        *((text, "x.yaml: expected sections") for text in (b"", b"# none\n", b"[1]", b"seed")),
        (b"seed: 1" + b"0" * 5000, "x.yaml: a value cannot be read: Exceeds the limit (4300"),
        (b"seed: 2024-99-99", "x.yaml: a value cannot be read: month must be in 1..12"),
        (b"seed: !!int abc", "x.yaml: a value cannot be read: invalid literal for int()"),
        (b"seed: !!bool abc", "x.yaml: a value cannot be read: 'abc'"),
        (b"seed: !!python/name:os.system x", "x.yaml: a value cannot be read: line 1 is not YAML"),
        (b"[a]: 1", "x.yaml: a value cannot be read: line 1 is not YAML: found unhashable key"),
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
        b"a: {b: 1}\nc: {b: 1}\n",
        b"a: &x {b: 1}\nc: {<<: *x, b: 2}\n",
        b"a: &x {b: 1}\ny: &y {c: 1}\nz:\n  <<: *x\n  <<: *y\n",
        b'{\n\t"seed": 1\n}',
    ],
)
def test_other_texts_are_accepted(text):
    check_config_text("x.yaml", text)


def test_the_config_has_no_key_twice():
    check_config_files([ROOT / "config.yaml", ROOT / "none.yaml"])
