"""Requests to an OpenAI-compatible endpoint: concurrent, limited, repeated on failure, and cached.

A reply that the cache has costs no request (snakechat/workflow/reply_cache.py).
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import httpx2

from snakechat.config.llm_judges import api_key
from snakechat.config.references import JUDGES
from snakechat.workflow.digests import digest
from snakechat.workflow.distributed import rank, world_size
from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_line
from snakechat.workflow.progress_lines import FIRST_LINE, ProgressLines
from snakechat.workflow.reply_cache import Reply, ReplyCache, Request

# Seconds without data, and in total, after which an attempt has failed.
TIMEOUT, DEADLINE = 180, 900
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


class TooLarge(Exception):
    """A response has more than MAX_BYTES."""


class ChatClient:
    """Sends conversations to a model and returns its replies.

    Args:
        name: Name of the judge in the config, for messages.
        settings: Settings of the judge: model, and parameters, further fields of each request.
        access: Where and how it is asked (snakechat/config/llm_judges.py). Several processes of a
            job share concurrency and requests_per_minute.
        cache: The cache of its replies.

    Attributes:
        counts: Requests, retries, cache hits, and tokens of this process.

    Raises:
        InputError: The environment variable of the API key is not set, or is not an API key.
    """

    def __init__(
        self, name: str, settings: dict[str, Any], access: dict[str, Any], cache: ReplyCache
    ) -> None:
        self.name, self.place = name, f"{JUDGES}.{name}"
        self.settings, self.cache = settings, cache
        self.url: str = access["url"].rstrip("/")
        self.key = api_key(name, access["key_env"])
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.num_threads = max(access["concurrency"] // world_size(), 1)
        limits = httpx2.Limits(max_connections=self.num_threads)
        self.client = httpx2.Client(headers=headers, timeout=TIMEOUT, limits=limits)
        limit = access["requests_per_minute"]
        # Seconds between the starts of two requests of this process.
        self.interval: float = 60 * world_size() / limit if limit else 0.0
        self.next_start = 0.0
        self.counts: Counter[str] = Counter()
        self.lock = Lock()

    @property
    def cache_folder(self) -> Path:
        """Folder of the replies of the model."""
        return self.cache.model_folder(self.settings["model"])

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
        with ThreadPoolExecutor(self.num_threads) as pool:
            futures = {
                key: pool.submit(self._reply, body, is_readable)
                for key, body in dict(zip(keys, bodies, strict=True)).items()
            }
            progress = ProgressLines(self.place, "replies", len(futures), next_line=FIRST_LINE)
            texts = {}
            try:
                for key, future in futures.items():
                    texts[key] = future.result().text
                    if rank() == 0:
                        progress.update(len(texts))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [texts[key] for key in keys]

    def _reply(self, body: Request, is_readable: Callable[[str], bool]) -> Reply:
        """Return the stored reply to a request, or send it."""
        stored = self.cache.find(body)
        if stored:
            self._count(cache_hits=1)
            return stored
        for _ in range(READ_ATTEMPTS):
            reply = self._read(self._send(body))
            if is_readable(reply.text):
                break
        return self.cache.add(body, reply)

    def _post(self, body: Request) -> tuple[httpx2.Response, str]:
        """Return the endpoint's response to a request, and its text.

        Raises:
            TooLarge: It has more than MAX_BYTES.
            httpx2.RequestError: It failed, or did not end within DEADLINE.
        """
        content, end = bytearray(), time.monotonic() + DEADLINE
        url = f"{self.url}/chat/completions"
        with self.client.stream("POST", url, json=body) as response:
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise TooLarge
                if time.monotonic() > end:
                    raise httpx2.ReadTimeout(f"the response did not end within {DEADLINE} s")
        return response, content.decode(errors="replace")

    def _send(self, body: Request) -> str:
        """Return the text of the endpoint's response to a request.

        Raises:
            InputError: All attempts failed.
        """
        for attempt in range(ATTEMPTS):
            self._wait_for_start()
            self._count(requests=1)
            wait: float = FIRST_WAIT * 2**attempt
            try:
                response, text = self._post(body)
            except TooLarge:
                failure = f"its response has more than {MAX_BYTES >> 20} MiB"
                break
            except (httpx2.RequestError, httpx2.InvalidURL) as error:
                failure = f"{type(error).__name__} {error}"
            else:
                if response.is_success:
                    return text
                failure = f"status {response.status_code}: {text}"
                if response.status_code not in (408, 429) and response.status_code < 500:
                    break
                seconds = response.headers.get("Retry-After", "")
                wait = max(wait, float(seconds) if seconds.isdecimal() else 0)
            if attempt < ATTEMPTS - 1:
                wait = min(wait, MAX_WAIT)
                self._count(retries=1)
                # In one piece: other threads print at the same time.
                line = f"{self.place}: {self.url}: {self._quote(failure)}; next attempt in"
                sys.stderr.write(f"{printable_line(line)} {wait:g} s\n")
                time.sleep(wait)
        raise InputError(
            f"{self.place}: {self.url} failed: {self._quote(failure)}: check url, model, parameters"
            " and key"
        )

    def _read(self, text: str) -> Reply:
        """Return the reply in a response; its text is empty if the model returned none.

        Raises:
            InputError: The response is no chat completion.
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
        reply = Reply(content or "", *(n if isinstance(n, int) else 0 for n in tokens))
        self._count(prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens)
        return reply

    def _wait_for_start(self) -> None:
        """Wait until requests_per_minute allows another request."""
        with self.lock:
            now = time.monotonic()
            start = max(self.next_start, now)
            self.next_start = start + self.interval
        time.sleep(start - now)

    def _count(self, **numbers: int) -> None:
        with self.lock:
            self.counts.update(numbers)

    def _quote(self, text: str) -> str:
        """Return a text on one line, truncated, without the API key."""
        text = text if self.key is None else text.replace(self.key, "***")
        return " ".join(text.split())[:MAX_QUOTED]
