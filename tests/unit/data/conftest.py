"""Tokenizers with few tokens."""

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from init_model import train_tokenizer
from snakechat.data.tokenizers import load_tokenizer
from support.chat_templates import CHATML


@pytest.fixture(scope="module")
def trained():
    """A tokenizer with a token for each byte, and <s>, <pad>, </s> and <unk>."""
    return train_tokenizer([], 260)


@pytest.fixture
def chat_tokenizer(trained, tmp_path):
    """Return a function that loads a tokenizer with a given chat template; <|im_end|> is eos.

    <|im_start|> is special in tokenizer.json alone, as <|start_header_id|> is in Llama 3's.
    """

    def make(template=CHATML, **special):
        backend = Tokenizer.from_str(trained.backend_tokenizer.to_str())
        backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            pad_token="<pad>",
            eos_token="<|im_end|>",
            **special,
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "chat")
        return load_tokenizer(tmp_path / "chat")

    return make
