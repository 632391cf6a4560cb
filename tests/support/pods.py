"""As much of a Kubernetes API as Snakemake's plugin asks of one, on this machine.

A pod is a process in an empty folder, which sees the files that are here.
"""

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

# What a pod without any process writes.
LOG = "all that this pod has to say"


class Cluster(ThreadingHTTPServer):
    """jobs: the bodies of all jobs so far, as they came in, by name. secrets: names of those that
    are there. run: whether pods run what they are told; others fail at once.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = Path(folder)
        self.jobs, self.pods, self.secrets = {}, {}, set()
        self.run = True

    def config(self, path):
        """Write what a client of this cluster has to know; the path of that."""
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

    def pod(self, name):
        """The pod of a job, as a client sees it."""
        code = self.pods[name][1].poll()
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        container = {"name": "snakemake", "image": "", "imageID": "", "ready": code is None}
        container |= {"restartCount": 0, "state": state}
        return {"metadata": {"name": name}, "status": {"containerStatuses": [container]}}

    def status(self, name):
        """The status of a job."""
        code = self.pods[name][1].poll()
        return {} if code is None else {"failed" if code else "succeeded": 1}


@contextmanager
def serving():
    """A Cluster that responses."""
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
    """Responses for a Cluster."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/jobs"):
            self.server.start(body)
        else:
            self.server.secrets.add(body["metadata"]["name"])
        self.response(body)

    def do_GET(self):
        url = urlsplit(self.path)
        asked, words = parse_qs(url.query), url.path.split("/")
        if words[-1] == "log":
            # As there: of a container that was never started again there is no log before.
            before = asked.get("previous") == ["True"]
            log, _ = self.server.pods[words[-2]]
            self.response({}, 400) if before else self.response(log.read_text())
        elif words[-1] == "pods":
            name = asked["labelSelector"][0].removeprefix("job-name=")
            self.response({"items": [self.server.pod(name)]})
        else:
            self.response({**self.server.jobs[words[-2]], "status": self.server.status(words[-2])})

    def do_DELETE(self):
        self.body()
        self.server.secrets.discard(self.path.split("/")[-1])
        self.response({})

    def body(self):
        """What a request brings."""
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return json.loads(text or "null")

    def response(self, body, code=200):
        """Response a request with a text, or with JSON."""
        text = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
