"""Replies of LLM judges that are stored, by their requests.

FOLDER/xx/DIGEST.json has a request, the reply and its token counts. DIGEST is computed from the
request's body: model, messages and parameters, without address and API key. Several processes may
use the folder at a time.
"""

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.errors import warn
from snakechat.workflow.manifest import digest
from snakechat.workflow.store import make_folders

# The body of a request.
Request = dict[str, Any]


class Reply(NamedTuple):
    """The text of a reply, and its token counts; 0 if the endpoint did not report them."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def find_reply(folder: Path, request: Request) -> Reply | None:
    """Return the stored reply to a request; None if there is none, or a damaged one."""
    try:
        record = json.loads(_path(folder, request).read_text())
        return Reply(*(record[name] for name in Reply._fields))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def store_reply(folder: Path, request: Request, reply: Reply) -> Reply:
    """Store the reply to a request; return the stored one, which may be another process's.

    The first reply that is stored is the one that all processes use: another run gets the same
    replies, even if the model would reply differently. A reply that cannot be stored is a warning:
    another run would send its request again.
    """
    path = _path(folder, request)
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    try:
        make_folders(path.parent)
        temporary.write_text(json.dumps({"request": request, **reply._asdict()}) + "\n")
        # Fails if there is a reply, which may be damaged, or on a file system without links.
        with suppress(OSError):
            os.link(temporary, path)
        if stored := find_reply(folder, request):
            return stored
        os.replace(temporary, path)
    except OSError as error:
        warn(f"replies are not stored in {folder}: {error.strerror}")
    finally:
        with suppress(OSError):
            temporary.unlink()
    return reply


def _path(folder: Path, request: Request) -> Path:
    key = digest(request)
    return folder / key[:2] / f"{key}.json"
