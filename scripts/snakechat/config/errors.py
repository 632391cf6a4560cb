"""The error of the configuration."""

from snakechat.workflow.errors import InputError

# Characters of an error. The value that it shows may be a whole section.
MAX_LENGTH = 2000


class ConfigError(InputError):
    """A mistake in the configuration; the message is one line for the user, cut in the middle."""

    def __init__(self, message: str) -> None:
        if len(message) > MAX_LENGTH:
            message = f"{message[: MAX_LENGTH // 2]} ... {message[-MAX_LENGTH // 2 :]}"
        super().__init__(message)
