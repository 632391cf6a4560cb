"""A small Hugging Face hub on this machine, whole or broken."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(model|dataset)s/(.+)/(revision|tree)/([^/]+)")
FILE = re.compile(r"/(?:(dataset)s/)?(.+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as snapshot_download needs.

    repositories: {file: bytes} of each "model/OWNER/NAME" or "dataset/OWNER/NAME". faults: what
    goes wrong with a repository: "cut" ends each file in its middle; "file", "head", "revision" and
    "tree" answer these requests with status 500; "html" is a page that is not the hub's.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.faults, self.requests = {}, {}, []

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, repository):
        return hashlib.sha1(repository.encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers for a Hub: the commit behind a revision, its list of files, and the files."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(path)
        if match := API.fullmatch(path):
            kind, name, what, revision = match.groups()
            file = None
        elif match := FILE.fullmatch(path):
            kind, name, revision, file = match.groups()
            what = "file"
        else:
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        repository = f"{kind or 'model'}/{name}"
        commit = self.server.commit(repository)
        fault = self.server.faults.get(repository)
        files = self.server.repositories.get(repository)
        if files is None:
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", commit):
            return self.answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        if fault == {"HEAD": "head"}.get(self.command, what):
            return self.answer(500)
        if what == "revision":
            if fault == "html":
                return self.answer(200, b"<html>Please log in</html>")
            about = {"id": name, "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            return self.answer(200, json.dumps(about).encode())
        if what == "tree":
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": git_digest(data)}
                for file, data in files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if file not in files:
            return self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{git_digest(files[file])}"', "X-Repo-Commit": commit}
        self.answer_file(files[file], headers, cut=fault == "cut")

    def answer_file(self, data, headers, cut):
        start, status = 0, 200
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(status, data[start:], headers, until=len(data) // 2 - start if cut else None)

    def answer(self, status, data=b"", headers=None, until=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data if until is None else data[: max(until, 0)])


def git_digest(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
