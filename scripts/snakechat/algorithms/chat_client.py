"""Requests to an OpenAI-compatible endpoint: concurrent, limited, repeated on failure, and cached.

FOLDER/xx/DIGEST.json has a request, the reply and its token counts: a reply that is stored costs no
request. DIGEST is computed from the request's body: model, messages and parameters, without address
and API key. Several processes may use the folder at a time.

The library openai sends the requests. Its own retries are not used: they wait too briefly for a
server that starts again, and give no reason.
"""

import asyncio
import json
import os
import re
import sys
import time
import uuid
from asyncio import sleep
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2

from snakechat.config.references import JUDGES, api_key
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import FIRST_LINE, InputError, ProgressLines, warn
from snakechat.workflow.locks import make_folders
from snakechat.workflow.printable import printable_line
from snakechat.workflow.processes import rank, world_size

if TYPE_CHECKING:
    import openai

# Seconds without data after which an attempt has failed.
TIMEOUT = 180
# Seconds after which a request has failed, with all attempts, whatever the endpoint sends.
DEADLINE = 900
# Largest response, decompressed.
MAX_BYTES = 16 << 20
# Attempts of a request. Each wait is twice the one before, or what the endpoint asks for.
ATTEMPTS, FIRST_WAIT, MAX_WAIT = 8, 1, 60
# Requests until a reply is readable; after the last one, the unreadable reply is kept.
READ_ATTEMPTS = 3
# Characters of an endpoint's text that a message quotes.
MAX_QUOTED = 200

# Turns as the endpoint receives them: role and content.
Messages = list[dict[str, str]]
# The body of a request.
Request = dict[str, Any]

# Headers of a request. The library adds others that name the machine, or come from the environment:
# an organization, or OPENAI_CUSTOM_HEADERS.
HEADERS = ("host", "authorization", "content-type", "content-length", "accept", "accept-encoding")


class Reply(NamedTuple):
    """The text of a reply, and its token counts; 0 if the endpoint did not report them."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class TooLarge(Exception):
    """A response has more than MAX_BYTES."""


class HttpClient(httpx2.AsyncClient):
    """Sends HEADERS alone, follows no redirect, and reads at most MAX_BYTES of a response."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Return the response, decompressed.

        Raises:
            TooLarge: It has more than MAX_BYTES.
            httpx2.RequestError: The request failed.
        """
        sent = [item for item in request.headers.multi_items() if item[0] in HEADERS]
        request.headers = httpx2.Headers(sent)
        options |= {"stream": True, "follow_redirects": False}
        content = bytearray()
        response = await super().send(request, **options)
        async with aclosing(response):
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise TooLarge
        seconds = response.headers.get("Retry-After", "")
        headers = {"Retry-After": seconds if seconds.isascii() and seconds.isdecimal() else "0"}
        return httpx2.Response(
            response.status_code, headers=headers, content=bytes(content), request=request
        )


class ChatClient:
    """Sends conversations to a model and returns its replies.

    Args:
        name: Name of the judge in the config, for messages.
        settings: Settings of the judge: model, and parameters, further fields of each request.
        access: Where and how it is asked (snakechat/config/sections.py). Several processes of a
            job share concurrency and requests_per_minute.
        folder: The folder of the model's stored replies.

    Attributes:
        counts: Requests, retries, cache hits, and tokens of this process.

    Raises:
        InputError: The environment variable of the API key is not set, or is not an API key.
    """

    def __init__(
        self, name: str, settings: dict[str, Any], access: dict[str, Any], folder: Path
    ) -> None:
        self.name, self.place = name, f"{JUDGES}.{name}"
        self.settings, self.folder = settings, folder
        self.url: str = access["url"].rstrip("/")
        self.key = api_key(name, access["key_env"])
        self.concurrency = max(access["concurrency"] // world_size(), 1)
        limit = access["requests_per_minute"]
        # Seconds between the starts of two requests of this process.
        self.interval: float = 60 * world_size() / limit if limit else 0.0
        self.next_start = 0.0
        self.counts: Counter[str] = Counter()

    def replies(
        self, conversations: Sequence[Messages], is_readable: Callable[[str], bool]
    ) -> list[str]:
        """Return the reply to each conversation. Equal ones are sent once.

        A reply that is not readable is requested again, READ_ATTEMPTS times in total.

        Raises:
            InputError: The endpoint failed.
        """
        bodies = [
            {**self.settings["parameters"], "model": self.settings["model"], "messages": messages}
            for messages in conversations
        ]
        keys = list(map(digest, bodies))
        replies = asyncio.run(self._replies(dict(zip(keys, bodies, strict=True)), is_readable))
        return [replies[key] for key in keys]

    async def _replies(
        self, bodies: dict[str, Request], is_readable: Callable[[str], bool]
    ) -> dict[str, str]:
        """Return the replies to requests by their keys."""
        # It takes half a second, in which a job without LLM judges can start.
        import openai

        progress = ProgressLines(self.place, "replies", len(bodies), next_line=FIRST_LINE)
        replies: dict[str, str] = {}
        free = asyncio.Semaphore(self.concurrency)
        limits = httpx2.Limits(max_connections=self.concurrency)

        async def ask(key: str, body: Request) -> None:
            async with free:
                reply = await self._reply(client, body, is_readable)
            replies[key] = reply.text
            if rank() == 0:
                progress.update(len(replies))

        async with openai.AsyncOpenAI(
            base_url=self.url,
            # Without one, the library takes a key from the environment.
            api_key=self.key or "none",
            http_client=HttpClient(timeout=TIMEOUT, limits=limits),
            max_retries=0,
        ) as client:
            tasks = [asyncio.create_task(ask(*item)) for item in bodies.items()]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return replies

    async def _reply(
        self, client: "openai.AsyncOpenAI", body: Request, is_readable: Callable[[str], bool]
    ) -> Reply:
        """Return the stored reply to a request, or send it."""
        if stored := find_reply(self.folder, body):
            self.counts["cache_hits"] += 1
            return stored
        for _ in range(READ_ATTEMPTS):
            reply = self._read(await self._send(client, body))
            if is_readable(reply.text):
                break
        return store_reply(self.folder, body, reply)

    async def _send(self, client: "openai.AsyncOpenAI", body: Request) -> str:
        """Return the text of the endpoint's response to a request.

        Raises:
            InputError: All attempts failed.
        """
        import openai

        headers = {"Authorization": f"Bearer {self.key}" if self.key else openai.omit}
        end: float | None = None
        for attempt in range(ATTEMPTS):
            await self._wait_for_start()
            self.counts["requests"] += 1
            wait: float = FIRST_WAIT * 2**attempt
            end = end or time.monotonic() + DEADLINE
            request = client.post(
                "/chat/completions",
                body=body,
                cast_to=httpx2.Response,
                options={"headers": headers},
            )
            try:
                # Ends the attempt whatever the endpoint does: TIMEOUT is the time between bytes.
                return (await asyncio.wait_for(request, end - time.monotonic())).text
            except TooLarge:
                failure = f"its response has more than {MAX_BYTES >> 20} MiB"
                break
            except TimeoutError:
                failure = f"it did not respond within {DEADLINE} s"
                break
            except openai.APIStatusError as error:
                failure = f"status {error.status_code}: {error.response.text}"
                if error.status_code not in (408, 429) and error.status_code < 500:
                    break
                wait = max(wait, float(error.response.headers["Retry-After"]))
            except openai.APIConnectionError as error:
                failure = f"{type(error.__cause__).__name__} {error.__cause__}"
            if attempt < ATTEMPTS - 1:
                wait = min(wait, MAX_WAIT)
                self.counts["retries"] += 1
                line = f"{self.place}: {self.url}: {self._quote(failure)}; next attempt in"
                print(f"{printable_line(line)} {wait:g} s", file=sys.stderr)
                await sleep(wait)
        raise InputError(
            f"{self.place}: {self.url} failed: {self._quote(failure)}: check url, model, parameters"
            " and key"
        )

    def _read(self, text: str) -> Reply:
        """Return the reply in a response; its text is empty if the model returned none.

        The text is without the API key, which an endpoint may send back: replies are stored.

        Raises:
            InputError: The response is not a chat completion.
        """
        try:
            completion = json.loads(text)
            content = completion["choices"][0]["message"]["content"]
            usage = completion.get("usage") or {}
            tokens = [usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            content, tokens = 0, []
        if not isinstance(content, str | None):
            raise InputError(
                f"{self.place}: expected a chat completion from {self.url}, found"
                f" {self._quote(text)}"
            )
        # Half of a surrogate pair cannot be written as UTF-8.
        content = self._without_key((content or "").encode(errors="replace").decode())
        counts = (n if isinstance(n, int) and 0 <= n < MAX_BYTES else 0 for n in tokens)
        reply = Reply(content, *counts)
        self.counts["prompt_tokens"] += reply.prompt_tokens
        self.counts["completion_tokens"] += reply.completion_tokens
        return reply

    async def _wait_for_start(self) -> None:
        """Wait until requests_per_minute allows another request."""
        now = time.monotonic()
        start = max(self.next_start, now)
        self.next_start = start + self.interval
        await sleep(start - now)

    def _without_key(self, text: str) -> str:
        # A local server may take any key, such as x.
        if self.key is None or len(self.key) < 4:
            return text
        # Also as JSON, addresses and HTML escape it, once or more often.
        characters = (
            rf"(?:\\{{0,8}}{re.escape(c)}|\\{{1,8}}u{ord(c):04x}|%(?:25)*{ord(c):02x}"
            rf"|&(?:amp;)*\#(?:{ord(c)}|x{ord(c):x});)"
            for c in self.key
        )
        return re.sub(r"\s*".join(characters), "***", text, flags=re.IGNORECASE)

    def _quote(self, text: str) -> str:
        """Return a text on one line, truncated, without the API key."""
        return " ".join(self._without_key(text).split())[:MAX_QUOTED]


# --- stored replies -------------------------------------------------------------------------------


def find_reply(folder: Path, request: Request) -> Reply | None:
    """Return the stored reply to a request; None if there is none, or a damaged one."""
    try:
        record = json.loads(_path(folder, request).read_text())
        return Reply(*(record[name] for name in Reply._fields))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
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
        try:
            os.link(temporary, path)
        except OSError:
            # Another reply, which may be damaged, or a file system without links.
            if not find_reply(folder, request):
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        warn(f"replies are not stored in {folder}: {error.strerror}")
    return find_reply(folder, request) or reply


def _path(folder: Path, request: Request) -> Path:
    key = digest(request)
    return folder / key[:2] / f"{key}.json"
