"""Headless Chromium for tests, driven through its debugging pipe: no port, no driver, no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run --disable-dev-shm-usage --window-size=1100,760 "
    "--remote-debugging-pipe"
).split()


class Browser:
    """One page. Messages are JSON that ends with a zero byte."""

    def __init__(self, to, back):
        self._to, self._back, self._rest, self._number, self._session = to, back, b"", 0, None

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]

    def open(self, url):
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def run(self, script):
        """The value of an expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_until(self, script, seconds=60):
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"waited in vain for {script}; the page says {self.text()!r}"
            time.sleep(0.05)

    def text(self):
        return self.run("document.body.innerText")

    def click(self, name):
        self.run(f"document.getElementById({json.dumps(name)}).click()")

    def fill(self, name, value):
        """Writes into a field and tells the page so."""
        self.run(
            f"(() => {{ const field = document.getElementById({json.dumps(name)}); field.value = {json.dumps(value)};"
            " field.dispatchEvent(new Event('change')); })()"
        )

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _read(self):
        while b"\0" not in self._rest:
            assert select.select([self._back], [], [], 60)[0], "the browser says nothing"
            piece = os.read(self._back, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(folder):
    """A browser with a profile below a folder."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on the path, so the page cannot be used")
    (theirs_in, to), (back, theirs_out) = os.pipe(), os.pipe()
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    # The pipe is read as descriptor 3 and written as 4.
    wrapped = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', *command]
    process = subprocess.Popen(
        wrapped, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(to, back)
    finally:
        os.close(to)
        os.close(back)
        process.terminate()
        process.wait(timeout=30)
