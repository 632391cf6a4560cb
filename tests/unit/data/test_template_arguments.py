"""Defaults of the variables of a chat template."""

from types import SimpleNamespace

import pytest

import init_model
from conftest import INIT
from snakechat.data.tokenizers import load_tokenizer, set_template_defaults
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError
from support import family_tokenizers
from support.chat_templates import CHATML

# As Qwen3's: without thoughts, a response starts with an empty one. A macro reads a variable too.
IS_OFF = "enable_thinking is defined and enable_thinking is false"
EMPTY = "<think>\n\n</think>\n\n"
PROMPTED = CHATML + f"{{% if add_generation_prompt and {IS_OFF} %}}{EMPTY}{{% endif %}}"
THINKING = "{%- macro shown() %}{{ name if name is defined }}{% endmacro %}" + PROMPTED.replace(
    "{{ message.content }}",
    f"{{% if loop.last and message.role == 'assistant' and {IS_OFF} %}}{EMPTY}{{% endif %}}"
    "{{ shown() if message.role == 'user' }}{{ message.content }}",
)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
VALUES = {"enable_thinking": False, "name": 'A "name" 为\n'}


def tokenizer_with(template):
    tokenizer = family_tokenizers.qwen2_5()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("start", ["", "\n", "  ", "  {% if true %}\n  x{% endif %}"])
@pytest.mark.parametrize("end", ["", "{% generation %}{% endgeneration %}"])
def test_a_saved_tokenizer_renders_as_with_the_arguments(start, end, tmp_path):
    tokenizer = tokenizer_with(start + THINKING + end)

    def rendered(each, **arguments):
        return each.apply_chat_template(MESSAGES, add_generation_prompt=True, **arguments)

    expected = rendered(tokenizer, **VALUES)
    other = rendered(tokenizer, **{**VALUES, "enable_thinking": True})
    set_template_defaults(tokenizer, VALUES)
    tokenizer.save_pretrained(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert rendered(saved) == expected
    # A caller may pass another value.
    assert rendered(saved, enable_thinking=True) == other != expected
    set_template_defaults(saved, {"enable_thinking": True})
    assert rendered(saved) == other


@pytest.mark.parametrize(
    ("template", "found"), [(None, "no chat template"), (THINKING, "enable_thinking, messages")]
)
def test_arguments_without_an_effect_are_rejected(template, found):
    with pytest.raises(InputError, match=found) as error:
        set_template_defaults(tokenizer_with(template), {"thinking": False})
    assert "thinking" in str(error.value) and "\n" not in str(error.value)


def test_a_new_model_has_the_arguments_in_its_template(tmp_path):
    source, result = tmp_path / "source", tmp_path / "result"
    tokenizer_with(THINKING).save_pretrained(source)
    result.mkdir()
    settings = SimpleNamespace(tokenizer={}, init=INIT, seed=1, template_arguments=VALUES)
    files = {path.name: file_digest(path) for path in source.iterdir() if path.is_file()}
    job = SimpleNamespace(
        settings=settings,
        options=SimpleNamespace(source=str(source)),
        spec={"name": "mine", "files": files},
        result=result,
    )
    init_model.main(job)
    expected = load_tokenizer(source).apply_chat_template(MESSAGES, **VALUES)
    assert load_tokenizer(result).apply_chat_template(MESSAGES) == expected
