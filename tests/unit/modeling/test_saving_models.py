"""Saved models: formats, what stops a response, and reproducible bytes."""

from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
)

from snakechat.modeling.saving import save_model


def test_a_saved_generation_config_stops_at_eos_and_at_the_ids_of_the_base_model(
    model, tokenizer, tmp_path
):
    # Its sampling settings are not saved.
    model.generation_config = GenerationConfig(repetition_penalty=1.3, top_k=5, eos_token_id=9)
    save_model(model, tokenizer, tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert config.do_sample
    assert config.eos_token_id == [tokenizer.eos_token_id, 9]
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.repetition_penalty in (None, 1.0)
