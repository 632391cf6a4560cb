"""A local server that implements the Hugging Face hub's protocol, with faults on request."""

import hashlib
import json
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from support.configs import project_values
from support.stub_server import StubServer, running

ROOT = Path(__file__).resolve().parents[2]

API = re.compile(r"/api/(model|dataset)s/(.+)/revision/([^/]+)")
FILE = re.compile(r"/(?:(dataset)s/)?(.+)/resolve/([^/]+)/(.+)")
# Files kept as LFS, identified by SHA-256; git stores the others, identified by SHA-1.
LARGE = (".parquet", ".safetensors", ".bin")


class Hub(StubServer):
    """The requests of the hub's API for listing and downloading files.

    Attributes:
        repositories: {file: bytes} of each "model/OWNER/NAME" or "dataset/OWNER/NAME".
        requests: All requests so far.
        faults: Fault of a repository:
            "damaged": one byte of each file is wrong
            "list": requests for the list of files get the response 500
    """

    def __init__(self):
        super().__init__()
        self.repositories, self.faults, self.requests = {}, {}, []

    def commit(self, repository):
        return hashlib.sha1(repository.encode()).hexdigest()

    def loads(self, repository):
        """Return how often each file of a repository was sent."""
        loads = Counter()
        for request in self.requests:
            match = FILE.fullmatch(request.path)
            if match and request.command == "GET" and request.status == 200:
                kind, name, _, file = match.groups()
                if f"{kind or 'model'}/{name}" == repository:
                    loads[file] += 1
        return loads

    def answer(self, request):
        self.requests.append(request)
        match = API.fullmatch(request.path) or FILE.fullmatch(request.path)
        if not match:
            return missing("Repo")
        # A request for the list of files names none.
        kind, name, revision, *path = match.groups()
        repository = f"{kind or 'model'}/{name}"
        commit, files = self.commit(repository), self.repositories.get(repository)
        fault = self.faults.get(repository)
        if files is None:
            return missing("Repo")
        if revision not in ("main", commit):
            return missing("Revision")
        if not path:
            if fault == "list":
                return 500, {}, b""
            with_digests = "blobs" in request.query
            siblings = [listed(file, data, with_digests) for file, data in files.items()]
            return 200, {}, {"id": name, "sha": commit, "siblings": siblings, "private": False}
        [file] = path
        if file not in files:
            return missing("Entry")
        data = files[file]
        headers = {"ETag": f'"{name_of(file, data)}"', "X-Repo-Commit": commit}
        if data and fault == "damaged":
            data = data[:-1] + bytes([data[-1] ^ 1])
        return 200, headers, data


def missing(what):
    return 404, {"X-Error-Code": f"{what}NotFound"}, b""


def serving():
    """Run a Hub in a thread."""
    return running(Hub())


@contextmanager
def serving_opt(home):
    """Run a Hub with OPT models of which only the configs are real.

    Yields the Hub and the variables with which programs use it. home: folder of the cache.
    """
    # It imports torch.
    from support.specs import OPT_CONFIGS

    models = project_values()["models"].values()
    revisions = {f"model/{model['hub']}": model["revision"] for model in models if "hub" in model}
    with serving() as hub:
        hub.commit = revisions.__getitem__
        for name, config in OPT_CONFIGS.items():
            files = {"config.json": json.dumps(config).encode(), "model.safetensors": b"weights"}
            hub.repositories[f"model/facebook/{name}"] = files
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        yield hub, environment | {"NO_PROXY": "127.0.0.1,localhost"}


def listed(path, data, with_digests):
    """Return the entry of a file in the hub's list."""
    if not with_digests:
        return {"rfilename": path}
    about = {"rfilename": path, "size": len(data), "blobId": git_digest(data)}
    if path.endswith(LARGE):
        about["lfs"] = {"sha256": name_of(path, data), "size": len(data), "pointerSize": 134}
    return about


def name_of(path, data):
    """Return the digest that identifies a file on the hub and in the cache."""
    return hashlib.sha256(data).hexdigest() if path.endswith(LARGE) else git_digest(data)


def git_digest(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
