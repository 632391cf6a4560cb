"""Chat templates as models have them, and models that generate given tokens."""

import copy

# ChatML, as many models have it.
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Gemma's: no place for a system turn, and bos in front.
WITHOUT_SYSTEM = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported\n(nor ever will be)') }}"
    "{% endif %}" + CHATML
)
# Tools and calls as Llama 3.1's template writes them: the tools in front of the first question, and
# a call as a JSON object with parameters.
LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}Answer, or call a function as JSON.\n\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{% if message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('One call at once') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Qwen3's: thoughts of the last response alone, and an empty one in front of it if it has none.
QWEN_THOUGHTS = (
    "{% set last = namespace(n=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.n = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% set content = message.content %}"
    "{% if message.role == 'assistant' %}"
    "{% set thoughts = message.reasoning_content or '' %}{% if '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > last.n and (loop.last or thoughts) %}"
    "<think>\n{{ thoughts }}\n</think>\n\n{% endif %}{% endif %}"
    "{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As DeepSeek-R1's: the prompt starts the thoughts, and only the last response has its thoughts.
R1_THOUGHTS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>"
    "{% if loop.last and message.reasoning_content %}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% set kept = message.content if loop.last else message.content.split('</think>')[-1] %}"
    "{{ kept }}{{ eos_token }}"
    "{% else %}<|{{ message.role }}|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# As gpt-oss's: channels for thoughts and text, and another end of the last turn.
OSS_THOUGHTS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% if loop.last and message.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# ChatML with tools, their calls and their results, as Qwen2.5's.
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def as_chatml(tokenizer):
    """A copy of a tokenizer with ChatML, and <|im_end|> as its eos."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML
    return tokenizer


def script_ids(model, ids):
    """Make a model generate token ids, over and over; return the hook, a context manager."""
    remaining = []

    def hook(model, inputs, outputs):
        if not remaining:
            remaining.extend(ids)
        outputs.logits[:, -1] = -100
        outputs.logits[:, -1, remaining.pop(0)] = 100

    return model.register_forward_hook(hook)
