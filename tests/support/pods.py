"""A stub of the Kubernetes API with the calls of Snakemake's plugin.

A pod is a process of this machine in an empty folder.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from support.stub_server import StubServer, running

# The log of a pod that fails at once.
LOG = "the log of a pod that failed"


class Cluster(StubServer):
    """The server.

    jobs: the bodies of all jobs so far, by name. secrets: the data of existing secrets, by
    name. run: whether pods run their commands; otherwise they fail at once.
    """

    def __init__(self):
        super().__init__()
        self.jobs, self.pods, self.secrets = {}, {}, {}
        self.run = True

    def config(self, path):
        """Write a kubeconfig for this cluster and return its path."""
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": self.endpoint}}],
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

    def answer(self, request):
        segments, ok = request.path.split("/"), (200, {"Content-Type": "application/json"})
        if request.command == "DELETE":
            self.secrets.pop(segments[-1], None)
            return *ok, {}
        if request.command == "POST":
            body = request.json
            if segments[-1] == "jobs":
                self.start(body)
            else:
                self.secrets[body["metadata"]["name"]] = body["data"]
            return *ok, body
        if segments[-1] == "log":
            # As in Kubernetes: a container that never restarted has no previous log.
            if request.query.get("previous") == ["True"]:
                return 400, {}, {}
            log, _ = self.pods[segments[-2]]
            return *ok, log.read_text()
        if segments[-1] == "pods":
            name = request.query["labelSelector"][0].removeprefix("job-name=")
            return *ok, {"items": [self.pod(name)]}
        return *ok, {**self.jobs[segments[-2]], "status": self.status(segments[-2])}


@contextmanager
def serving():
    """Yield a Cluster that responds to requests."""
    with running(Cluster()) as cluster:
        try:
            yield cluster
        finally:
            for _, process in cluster.pods.values():
                process.kill()
                process.wait()
