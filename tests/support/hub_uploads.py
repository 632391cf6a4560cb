"""A local server with the requests of the Hugging Face hub's API that uploads of models need."""

import base64
import hashlib
import json
import re
from urllib.parse import unquote, urlsplit

import yaml

from support.hub import LARGE, Handler, Hub, Request, name_of

USER = {"name": "lab", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": "write"}}}
PREUPLOAD = re.compile(r"/api/models/(.+)/preupload/main")
COMMIT = re.compile(r"/api/models/(.+)/commit/main")
# The hub takes identifiers of its own list; it has these two for all others.
LICENSES = {"mit", "apache-2.0", "cc-by-4.0", "other", "unknown"}


class UploadHub(Hub):
    """Takes files of models, in commits.

    Attributes:
        user: The reply to whoami; None for a token that is not valid.
        private: The names of private repositories.
        commits: Message of each commit, by name.
        objects: Large files by sha256.
        fault: Fault of the next commits:
            "forbidden": 403
            "unavailable": 500
            "conflict": another commit came first
            "damaged": one file arrives with other bytes
    """

    def __init__(self):
        super().__init__(UploadHandler)
        self.user, self.private, self.commits, self.objects = USER, set(), {}, {}
        self.fault = None

    def commit(self, repository):
        commits = self.commits.get(repository.partition("/")[2], [])
        return hashlib.sha1(json.dumps([repository, commits]).encode()).hexdigest()

    def is_private(self, name):
        return name in self.private


class UploadHandler(Handler):
    """Handles requests for uploads, and those of Handler."""

    def do_GET(self):
        if urlsplit(self.path).path != "/api/whoami-v2":
            return super().do_GET()
        self.note("GET")
        if self.server.user is None:
            return self.reply(401, {"error": "Invalid user token."})
        return self.reply(200, self.server.user)

    def do_PUT(self):
        self.note("PUT")
        data = self.read()
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self.reply(200, {})

    def do_POST(self):
        path, hub = self.note("POST"), self.server
        data = self.read()
        if path == "/api/validate-yaml":
            errors = card_errors(json.loads(data)["content"])
            return self.reply(400 if errors else 200, {"errors": errors, "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked.get('organization') or hub.user['name']}/{asked['name']}"
            hub.repositories[f"model/{name}"] = {".gitattributes": b"*.safetensors filter=lfs\n"}
            hub.commits[name] = ["initial commit"]
            hub.private |= {name} if asked["visibility"] == "private" else set()
            return self.reply(200, {"url": f"{hub.endpoint}/{name}"})
        if match := PREUPLOAD.fullmatch(path):
            return self.reply(200, {"files": self.upload_modes(match[1], json.loads(data))})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [self.action(of) for of in json.loads(data)["objects"]]
            return self.reply(200, {"transfer": "basic", "objects": objects})
        if match := COMMIT.fullmatch(path):
            return self.take_commit(match[1], [json.loads(line) for line in data.splitlines()])
        return self.reply(404, {})

    def upload_modes(self, name, asked):
        """Return how each file of a commit is to be sent."""
        files = self.server.repositories[f"model/{name}"]
        return [
            {
                "path": (path := of["path"]),
                "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": name_of(path, files[path]) if path in files else None,
            }
            for of in asked["files"]
        ]

    def action(self, asked):
        """Return how a large file is uploaded; a known one is not."""
        known = asked["oid"] in self.server.objects
        href = f"{self.server.endpoint}/lfs/{asked['oid']}"
        return asked | ({} if known else {"actions": {"upload": {"href": href, "header": {}}}})

    def take_commit(self, name, lines):
        """Apply a commit as a whole."""
        hub, repository = self.server, f"model/{name}"
        if status := {"forbidden": 403, "unavailable": 500}.get(hub.fault):
            return self.reply(status, {"error": hub.fault})
        header, *changes = lines
        parent = header["value"].get("parentCommit")
        if hub.fault == "conflict" or parent not in (None, hub.commit(repository)):
            return self.reply(412, {"error": "A commit has happened since."})
        files = dict(hub.repositories[repository])
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            else:
                del files[value["path"]]
        if hub.fault == "damaged":
            files["config.json"] += b" "
        hub.commits[name].append(header["value"]["summary"])
        hub.repositories[repository] = files
        commit = hub.commit(repository)
        url = f"{hub.endpoint}/{name}/commit/{commit}"
        return self.reply(200, {"success": True, "commitUrl": url, "commitOid": commit})

    def note(self, command):
        """Note a request; return its path."""
        path = unquote(urlsplit(self.path).path)
        self.request_seen = Request(command, path, self.headers.get("Authorization"))
        self.server.requests.append(self.request_seen)
        return path

    def read(self):
        """Return the body of a request."""
        if length := self.headers.get("Content-Length"):
            return self.rfile.read(int(length))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, status, value):
        """Send a JSON value."""
        data = json.dumps(value).encode()
        self.request_seen.status = status
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def card_errors(text):
    """Return what the hub rejects in the metadata of a card."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    metadata = yaml.safe_load(match[1]) if match else {}
    errors = []
    if metadata.get("license") not in {None, *LICENSES}:
        errors.append({"message": f'"license" must be one of {sorted(LICENSES)}'})
    for model in metadata.get("model-index", ()):
        for result in model["results"]:
            has_form = result["task"]["type"] and result["dataset"]["type"]
            has_form = has_form and result["dataset"]["name"] and model["name"]
            if not has_form or not all("value" in of and of["type"] for of in result["metrics"]):
                errors.append({"message": '"model-index" is not valid'})
    return errors
