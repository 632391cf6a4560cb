"""A local object store: moto's S3 server."""

import os
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from conftest import ROOT

# With s3fs and moto of tests/requirements-storage.txt.
PACKAGES = ROOT / ".venv-storage"
KEYS = {"AWS_ACCESS_KEY_ID": "key-of-the-test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}
# The server looks for one, and verifies none.
AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host,"
    " Signature=0"
)
# Prints its port, and ends with its standard input.
SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


class ObjectStore:
    """An S3 server, to which every client has access.

    Attributes:
        address: Its endpoint.
        environment: What a client needs.
    """

    def __init__(self, address):
        self.address = address
        self.environment = {
            **KEYS,
            "AWS_ENDPOINT_URL": address,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "PYTHONPATH": str(PACKAGES),
        }

    def put(self, path, content=b""):
        """Upload BUCKET/KEY, or make a BUCKET."""
        request = urllib.request.Request(
            f"{self.address}/{quote(path)}",
            content,
            {"Content-Type": "application/octet-stream", "Authorization": AUTHORIZATION},
            method="PUT",
        )
        urllib.request.urlopen(request, timeout=30).close()

    def put_folder(self, path, folder):
        """Upload the files of a folder."""
        for file in folder.iterdir():
            self.put(f"{path}/{file.name}", file.read_bytes())


@contextmanager
def serving_objects():
    """Run a server for the time of the context; skip the test if it is not installed."""
    if not PACKAGES.exists():
        pytest.skip("needs make .venv-storage/ready")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield ObjectStore(f"http://127.0.0.1:{process.stdout.readline().strip()}")
