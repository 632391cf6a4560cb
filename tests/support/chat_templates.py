"""Chat templates as models have them."""

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
