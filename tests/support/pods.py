"""A stub of the Kubernetes API with the calls of Snakemake's plugin.

A pod is a process of this machine in an empty folder.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

# The log of a pod that fails at once.
LOG = "the log of a pod that failed"


class Cluster(ThreadingHTTPServer):
    """The server.

    jobs: the bodies of all jobs so far, by name. secrets: the data of existing secrets, by
    name. run: whether pods run their commands; otherwise they fail at once.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = Path(folder)
        self.jobs, self.pods, self.secrets = {}, {}, {}
        self.run = True

    def config(self, path):
        """Write a kubeconfig for this cluster and return its path."""
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [
                {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}
            ],
            "users": [{"name": "me", "user": {}}],
        }
        path.write_text(json.dumps(config))
        return str(path)

    def start(self, job):
        """Start the pod of a job."""
        name = job["metadata"]["name"]
        self.jobs[name] = job
        [container] = job["spec"]["template"]["spec"]["containers"]
        command = [*container["command"], *container["args"]]
        folder = Path(tempfile.mkdtemp())
        environment = {
            **os.environ,
            **{each["name"]: self.secret(each) for each in container.get("env", ())},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        with open(folder / "log", "w") as log:
            self.pods[name] = (
                folder / "log",
                subprocess.Popen(
                    command if self.run else ["sh", "-c", f"echo {LOG}; exit 1"],
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=log,
                ),
            )

    def secret(self, variable):
        """Return the value of an environment variable of a container."""
        reference = variable["valueFrom"]["secretKeyRef"]
        return base64.b64decode(self.secrets[reference["name"]][reference["key"]]).decode()

    def pod(self, name):
        """Return the pod of a job as the API describes it."""
        code = self.pods[name][1].poll()
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        container = {"name": "snakemake", "image": "", "imageID": "", "ready": code is None}
        container |= {"restartCount": 0, "state": state}
        return {"metadata": {"name": name}, "status": {"containerStatuses": [container]}}

    def status(self, name):
        """Return the status of a job."""
        code = self.pods[name][1].poll()
        return {} if code is None else {"failed" if code else "succeeded": 1}


@contextmanager
def serving():
    """Yield a Cluster that responds to requests."""
    with tempfile.TemporaryDirectory() as folder, Cluster(folder) as cluster:
        threading.Thread(target=cluster.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield cluster
        finally:
            cluster.shutdown()
            for _, process in cluster.pods.values():
                process.kill()
                process.wait()


class Handler(BaseHTTPRequestHandler):
    """Responds to the requests of a Cluster."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/jobs"):
            self.server.start(body)
        else:
            self.server.secrets[body["metadata"]["name"]] = body["data"]
        self.respond(body)

    def do_GET(self):
        url = urlsplit(self.path)
        query, segments = parse_qs(url.query), url.path.split("/")
        if segments[-1] == "log":
            # As in Kubernetes: a container that never restarted has no previous log.
            previous = query.get("previous") == ["True"]
            log, _ = self.server.pods[segments[-2]]
            self.respond({}, 400) if previous else self.respond(log.read_text())
        elif segments[-1] == "pods":
            name = query["labelSelector"][0].removeprefix("job-name=")
            self.respond({"items": [self.server.pod(name)]})
        else:
            self.respond(
                {**self.server.jobs[segments[-2]], "status": self.server.status(segments[-2])}
            )

    def do_DELETE(self):
        self.body()
        self.server.secrets.pop(self.path.split("/")[-1], None)
        self.respond({})

    def body(self):
        """Return the JSON body of the request, or None."""
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return json.loads(text or "null")

    def respond(self, body, code=200):
        """Send a text, or any other value as JSON."""
        text = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
