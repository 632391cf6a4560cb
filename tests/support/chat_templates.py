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
