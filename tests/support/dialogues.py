"""Dialogues as turns and as prompts."""

from snakechat.data.dialogues import parse_prompt

# Turns of each dialogue, and the prompt that they render to.
DIALOGUES = {
    "one question": (
        [("user", "Can you help?")],
        "\n\nHuman: Can you help?\n\nAssistant:",
    ),
    "several turns": (
        [("user", "Hello."), ("assistant", "Hi."), ("user", "Name a fruit.")],
        "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: Name a fruit.\n\nAssistant:",
    ),
    "a system turn": (
        [("system", "Be brief."), ("user", "Name a fruit.")],
        "\n\nSystem: Be brief.\n\nHuman: Name a fruit.\n\nAssistant:",
    ),
    "a system turn later on": (
        [("user", "Hello."), ("assistant", "Hi."), ("system", "Be rude."), ("user", "Hello?")],
        "\n\nHuman: Hello.\n\nAssistant: Hi.\n\nSystem: Be rude.\n\nHuman: Hello?\n\nAssistant:",
    ),
    "a response that is to be continued": (
        [("user", "Count."), ("assistant", "One,")],
        "\n\nHuman: Count.\n\nAssistant: One,\n\nAssistant:",
    ),
    "Chinese": (
        [("system", "请用中文。"), ("user", "天空为什么是蓝色的?"), ("assistant", "因为散射。")],
        "\n\nSystem: 请用中文。\n\nHuman: 天空为什么是蓝色的?"
        "\n\nAssistant: 因为散射。\n\nAssistant:",
    ),
    "paragraphs and code": (
        [("user", "Fix this:\n\n```\nif a:\n    b()\n```\n\nHow?")],
        "\n\nHuman: Fix this:\n\n```\nif a:\n    b()\n```\n\nHow?\n\nAssistant:",
    ),
    "markers within a line or after one line break": (
        [("user", "What is Human: for?\nAssistant: too\n\n Human: blank\n\nhuman: small")],
        "\n\nHuman: What is Human: for?\nAssistant: too\n\n Human: blank\n\nhuman: small"
        "\n\nAssistant:",
    ),
    "an empty turn": (
        [("user", ""), ("assistant", "Hi."), ("user", "Hello.")],
        "\n\nHuman: \n\nAssistant: Hi.\n\nHuman: Hello.\n\nAssistant:",
    ),
}


def make_record(prompt, chosen=None, rejected=None):
    """Return the record of a prompt in which markers mark turns."""
    return parse_prompt(prompt), chosen, rejected
