"""A local HTTP server in a thread, for stubs of services."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Request:
    """A request, and the status of its response."""

    command: str
    url: str
    headers: Message
    content: bytes
    status: int = 0

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.url).path)

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.url).query)

    @property
    def json(self) -> Any:
        return json.loads(self.content)


class StubServer(ThreadingHTTPServer):
    """Responds to each request with what the method `answer` of a subclass returns for it.

    That is the status, headers, and a body: bytes, a text, or any other value as JSON.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Log nothing."""

    def do_GET(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, self.headers, content)
        request.status, headers, body = self.server.answer(request)
        if not isinstance(body, bytes):
            body = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(request.status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_POST = do_DELETE = do_GET


@contextmanager
def running(server):
    """Run a server for the time of the context."""
    with server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
