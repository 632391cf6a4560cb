"""A headless browser (Chromium), controlled over its debugging pipe."""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Seconds until a browser is killed.
TIMEOUT = 120
# Requests that stay in the page or in the browser.
INTERNAL = ("data:", "about:", "blob:", "chrome:")


def find_browser():
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser(profile):
    """Start a Browser with a new profile, and kill it afterwards."""
    # Chromium reads commands from descriptor 3 and writes responses to 4.
    read_commands, write_commands = os.pipe()
    read_responses, write_responses = os.pipe()
    command = [
        find_browser(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--remote-debugging-pipe"),
        f"--user-data-dir={profile}",
    ]
    # The shell duplicates the ends of the pipes to these descriptors.
    redirect = f'exec "$@" 3<&{read_commands} 4>&{write_responses}'
    process = subprocess.Popen(
        ["bash", "-c", redirect, "bash", *command],
        pass_fds=(read_commands, write_responses),
        stderr=subprocess.DEVNULL,
    )
    end = threading.Timer(TIMEOUT, process.kill)
    os.close(read_commands)
    os.close(write_responses)
    with open(write_commands, "wb", buffering=0) as out, open(read_responses, "rb") as responses:
        try:
            # A browser that does not respond would block the test.
            end.start()
            yield Browser(out, responses)
        finally:
            end.cancel()
            process.kill()
            process.wait()


class Browser:
    """One page of the browser.

    Attributes:
        requests: URLs that the page requested outside of itself.
        errors: Errors on the console, and uncaught exceptions.
    """

    def __init__(self, out, responses):
        self.out, self.responses, self.number, self.session = out, responses, 0, None
        self.requests, self.errors = [], []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(1400)

    def resize(self, width):
        """Set the width of the window; that of a phone also makes it a phone's."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, theme):
        """Prefer the light or the dark theme of pages."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def call(self, method, **parameters):
        """Send a command and return its response; record the events before it."""
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
            self.record(response.get("method"), response.get("params", {}))

    def read(self):
        """Read the next message."""
        parts = []
        while (byte := self.responses.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts.append(byte)
        return json.loads(b"".join(parts))

    def record(self, method, event):
        """Record a request or an error."""
        if method == "Network.requestWillBeSent":
            url = event["request"]["url"]
            if not url.startswith(INTERNAL) and url != self.url:
                self.requests.append(url)
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.errors.append(str([argument.get("value") for argument in event["args"]]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(event["entry"]["text"])

    def open(self, path):
        """Open a file and wait until it is loaded."""
        self.url = path.resolve().as_uri()
        self.call("Page.navigate", url=self.url)
        self.wait_for("document.readyState == 'complete'")

    def run(self, script):
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script, seconds=30):
        """Wait until a JavaScript expression is true."""
        end = time.time() + seconds
        while not self.run(script):
            assert time.time() < end, f"never true: {script}"
            time.sleep(0.05)
