"""A local server that implements the Hugging Face hub's protocol, with faults on request."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parents[2]

API = re.compile(r"/api/(model|dataset)s/(.+)/revision/([^/]+)")
FILE = re.compile(r"/(?:(dataset)s/)?(.+)/resolve/([^/]+)/(.+)")
# Files kept as LFS, identified by SHA-256; git stores the others, identified by SHA-1.
LARGE = (".parquet", ".safetensors", ".bin")
ELSEWHERE = "/elsewhere"


@dataclass
class Request:
    """A request, and the range of the file's bytes that was sent: start to end."""

    command: str
    path: str
    token: str | None
    status: int = 0
    start: int = 0
    end: int = 0


class Hub(ThreadingHTTPServer):
    """The requests of the hub's API for listing and downloading files.

    As on the hub, requests for large files are redirected to another host.

    Attributes:
        repositories: {file: bytes} of each "model/OWNER/NAME" or "dataset/OWNER/NAME".
        requests: All requests so far.
        tokens: Token that a repository requires, if any.
        faults: Fault of a repository or of one file ("dataset/OWNER/NAME/FILE"):
            "drop": every third response with a file ends in its middle
            "cut": each response ends in the middle of the file
            "stall": a whole file stops in its middle until `hub.thaw` is set
            "damaged": one byte of each file is wrong
            "damaged once": one byte of the first response with each file is wrong
            "busy": the first response is 500, the second 429 with a wait of 55 s
            "list", "head", "file": these requests get the response 500
            "html": the list of files is a page of another server
            "bare": the list of files has names only
            "forbidden": 403
    """

    daemon_threads = True

    def __init__(self, handler=None):
        super().__init__(("127.0.0.1", 0), handler or Handler)
        self.repositories, self.faults, self.tokens = {}, {}, {}
        self.requests, self.file_responses, self.lock = [], 0, threading.Lock()
        self.thaw = threading.Event()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repository):
        return hashlib.sha1(repository.encode()).hexdigest()

    def is_private(self, name):
        return False

    def loads(self, repository):
        """Return the ranges sent of each file of a repository, one (start, end) per response."""
        loads = {}
        for request in self.requests:
            match = FILE.fullmatch(request.path.removeprefix(ELSEWHERE))
            if match and request.command == "GET" and request.status in (200, 206):
                kind, name, _, file = match.groups()
                if f"{kind or 'model'}/{name}" == repository:
                    loads.setdefault(file, []).append((request.start, request.end))
        return loads


@contextmanager
def serving(kind=Hub):
    """Run a Hub in a thread."""
    hub = kind()
    threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.thaw.set()
        hub.shutdown()
        hub.server_close()


@contextmanager
def serving_opt(home):
    """Run a Hub with OPT models of which only the configs are real.

    Yields the Hub and the variables with which programs use it. home: folder of the cache.
    """
    # It imports torch.
    from support.specs import OPT_CONFIGS

    models = yaml.safe_load((ROOT / "config.yaml").read_text())["models"].values()
    revisions = {f"model/{model['hub']}": model["revision"] for model in models if "hub" in model}
    with serving() as hub:
        hub.commit = revisions.__getitem__
        for name, config in OPT_CONFIGS.items():
            files = {"config.json": json.dumps(config).encode(), "model.safetensors": b"weights"}
            hub.repositories[f"model/facebook/{name}"] = files
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        yield hub, environment | {"NO_PROXY": "127.0.0.1,localhost"}


class Handler(BaseHTTPRequestHandler):
    """Handle requests for the list of files of a revision, and for files."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, url = self.server, urlsplit(self.path)
        path = unquote(url.path)
        self.request_seen = Request(self.command, path, self.headers.get("Authorization"))
        hub.requests.append(self.request_seen)
        file, here = None, not path.startswith(ELSEWHERE)
        path = path.removeprefix(ELSEWHERE)
        if match := API.fullmatch(path):
            kind, name, revision = match.groups()
        elif match := FILE.fullmatch(path):
            kind, name, revision, file = match.groups()
        else:
            return self.respond(404, headers={"X-Error-Code": "RepoNotFound"})
        repository = f"{kind or 'model'}/{name}"
        commit = hub.commit(repository)
        fault = hub.faults.get(f"{repository}/{file}", hub.faults.get(repository))
        files, token = hub.repositories.get(repository), hub.tokens.get(repository)
        if files is None:
            return self.respond(404, headers={"X-Error-Code": "RepoNotFound"})
        if token and here and self.request_seen.token != f"Bearer {token}":
            return self.respond(401, headers={"X-Error-Message": "Invalid username or password."})
        if revision not in ("main", commit):
            return self.respond(404, headers={"X-Error-Code": "RevisionNotFound"})
        if fault == "forbidden":
            return self.respond(403, headers={"X-Error-Message": "not for you"})
        if fault == ("list" if not file else {"HEAD": "head", "GET": "file"}[self.command]):
            return self.respond(500)
        if fault == "busy":
            seen = (self.command, self.request_seen.path)
            times = [(r.command, r.path) for r in hub.requests].count(seen)
            if times < 3:
                wait = {"RateLimit": '"resolvers";r=0;t=55'} if times == 2 else None
                return self.respond({1: 500, 2: 429}[times], headers=wait)
        if not file:
            if fault == "html":
                return self.respond(200, b"<html>Please log in</html>")
            blobs = "blobs" in parse_qs(url.query) and fault != "bare"
            siblings = [listed(file, data, blobs) for file, data in files.items()]
            about = {
                "id": name,
                "sha": commit,
                "siblings": siblings,
                "private": hub.is_private(name),
            }
            return self.respond(200, json.dumps(about).encode())
        if file not in files:
            return self.respond(404, headers={"X-Error-Code": "EntryNotFound"})
        if here and path.endswith(LARGE):
            host = f"http://localhost:{hub.server_port}"
            headers = {"Location": host + ELSEWHERE + self.path, "X-Repo-Commit": commit}
            headers["X-Linked-ETag"] = f'"{name_of(file, files[file])}"'
            return self.respond(302, headers=headers | {"X-Linked-Size": len(files[file])})
        self.respond_with_file(files[file], commit, fault)

    def respond_with_file(self, data, commit, fault):
        hub, start, status = self.server, 0, 200
        headers = {"ETag": f'"{git_digest(data)}"', "X-Repo-Commit": commit}
        requested = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if requested:
            start, status = int(requested[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        end = middle = len(data) // 2
        if fault == "drop" and self.command == "GET":
            with hub.lock:
                hub.file_responses += 1
                end = (start + len(data)) // 2 if hub.file_responses % 3 == 0 else len(data)
        elif fault == "cut":
            end = max(start, middle)
        elif fault == "stall" and not start and not hub.thaw.is_set():
            end = middle
        else:
            end = len(data)
        earlier = [r for r in hub.requests if r.command == "GET"]
        first = [r.path for r in earlier].count(self.request_seen.path) == 1
        if data and (fault == "damaged" or (fault == "damaged once" and first)):
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        self.respond(status, data[start:], headers, until=end - start)
        self.request_seen.start, self.request_seen.end = start, end
        if fault == "stall" and end == middle:
            hub.thaw.wait(30)

    def respond(self, status, data=b"", headers=None, until=None):
        self.request_seen.status = status
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[:until])


def listed(path, data, blobs):
    """Return the entry of a file in the hub's list."""
    about = {"rfilename": path}
    if blobs:
        about |= {"size": len(data), "blobId": git_digest(data)}
    if blobs and path.endswith(LARGE):
        about["lfs"] = {"sha256": name_of(path, data), "size": len(data), "pointerSize": 134}
    return about


def name_of(path, data):
    """Return the digest that identifies a file on the hub and in the cache."""
    return hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else git_digest(data)


def git_digest(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
