"""Replies of models behind endpoints, stored by the content of the request.

FOLDER/MODEL/xx/DIGEST.json has a request, the reply and its token counts. The digest is that of the
request's body: model, messages and parameters. Address and API key are no part of it.

Standard library only.
"""

import json
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from snakechat.workflow.digests import digest
from snakechat.workflow.errors import warn
from snakechat.workflow.locks import make_folders

Request = dict[str, Any]


class Reply(NamedTuple):
    """The text of a reply, and its token counts; 0 if the endpoint did not report them."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class ReplyCache:
    """Replies in a folder, which several processes may use at a time.

    The first reply to a request that is stored is the one that all processes use: another run gets
    the same replies, even if the model would reply differently.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model_folder(self, model: str) -> Path:
        """Return the folder with the replies of a model."""
        return self.folder / quote(model, safe="")

    def find(self, request: Request) -> Reply | None:
        """Return the stored reply to a request; None if there is none, or a damaged one."""
        try:
            record = json.loads(self._path(request).read_text())
            return Reply(*(record[name] for name in Reply._fields))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def add(self, request: Request, reply: Reply) -> Reply:
        """Store the reply to a request; return the stored one, which may be another process's.

        A reply that cannot be stored is a warning: another run would send its request again.
        """
        try:
            self._store(request, reply)
        except OSError as error:
            warn(f"replies are not stored in {self.folder}: {error.strerror}")
        return self.find(request) or reply

    def _store(self, request: Request, reply: Reply) -> None:
        path = self._path(request)
        make_folders(path.parent)
        temporary = path.with_name(f".{uuid.uuid4().hex}")
        temporary.write_text(json.dumps({"request": request, **reply._asdict()}) + "\n")
        try:
            os.link(temporary, path)
        except OSError:
            # Another reply, which may be damaged, or a file system without links.
            if not self.find(request):
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, request: Request) -> Path:
        key = digest(request)
        return self.model_folder(request["model"]) / key[:2] / f"{key}.json"
