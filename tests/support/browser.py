"""A browser without a window (Chromium), told what to do over its debugging pipe."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import threading
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Seconds, at most, of a browser.
LIFE = 120
# Nothing that is not in the page may be asked for; chrome: what the browser itself consists of.
INSIDE = ("data:", "about:", "blob:", "chrome:")


def find_browser():
    """Path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser(profile):
    """A Browser with a folder of its own, ended afterwards."""
    # It reads commands from descriptor 3 and responses on 4.
    read_commands, write_commands = os.pipe()
    read_responses, write_responses = os.pipe()
    command = [
        find_browser(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--remote-debugging-pipe"),
        f"--user-data-dir={profile}",
    ]
    # By a shell, which puts the ends where they belong.
    moved = f'exec "$@" 3<&{read_commands} 4>&{write_responses}'
    process = subprocess.Popen(
        ["bash", "-c", moved, "bash", *command],
        pass_fds=(read_commands, write_responses),
        stderr=subprocess.DEVNULL,
    )
    end = threading.Timer(LIFE, process.kill)
    os.close(read_commands)
    os.close(write_responses)
    with open(write_commands, "wb", buffering=0) as out, open(read_responses, "rb") as responses:
        try:
            # Where it responses no more, nobody waits for ever.
            end.start()
            yield Browser(out, responses)
        finally:
            end.cancel()
            process.kill()
            process.wait()


class Browser:
    """One page of it.

    requests: what the page asked for that is not in it; errors: what its console says is wrong.
    """

    def __init__(self, out, responses):
        self.out, self.responses, self.number, self.session = out, responses, 0, None
        self.requests, self.errors = [], []
        page = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        size = {"width": 1400, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def ask(self, method, **parameters):
        """Send a command and return its response; what happens meanwhile is noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.out.write(json.dumps(message).encode() + b"\0")
        while True:
            response = self.read()
            if response.get("id") == self.number:
                assert "error" not in response, (method, response["error"])
                return response["result"]
            self.note(response.get("method"), response.get("params", {}))

    def read(self):
        """The next message."""
        parts = []
        while (byte := self.responses.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts.append(byte)
        return json.loads(b"".join(parts))

    def note(self, method, told):
        """Note an event: a request, an error."""
        if method == "Network.requestWillBeSent":
            url = told["request"]["url"]
            if not url.startswith(INSIDE) and url != self.url:
                self.requests.append(url)
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(str([argument.get("value") for argument in told["args"]]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])

    def open(self, path):
        """Open a file, and wait until it is there."""
        self.url = path.resolve().as_uri()
        self.ask("Page.navigate", url=self.url)
        self.wait_for("document.readyState == 'complete'")

    def run(self, script):
        """The value of an expression of JavaScript in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script, seconds=30):
        """Wait until an expression is true."""
        end = time.time() + seconds
        while not self.run(script):
            assert time.time() < end, f"never true: {script}"
            time.sleep(0.05)

    def photograph(self, path):
        """Save what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))
