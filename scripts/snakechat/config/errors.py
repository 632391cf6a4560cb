"""The error of the configuration."""

from snakechat.workflow.errors import InputError


class ConfigError(InputError):
    """A mistake in the configuration; the message is one line for the user."""
