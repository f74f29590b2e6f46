"""A headless Chromium over the DevTools protocol: enough to load a page, use it and take its picture.

Also a command: ``python tests/browser.py page.html picture.png [light|dark|print] [width] [selector]``.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def chromium() -> str | None:
    """Return the browser, None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One browser with one tab; ``problems`` collects errors of the console and ``requests`` all that it asked for."""

    def __init__(self) -> None:
        import websocket

        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = ["--headless=new", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium refuses to run as root with it
        folder = Path(self._home.name)
        command = [chromium(), *flags, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        port = _wait(lambda: (folder / "DevToolsActivePort").read_text().split())
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{port[0]}{port[1]}", timeout=30, suppress_origin=True
        )
        self._number, self._session = 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict:
        """Send one command and return its answer; events that come before it are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps({**message, **({"sessionId": self._session} if self._session else {})}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(str([value.get("value", value.get("description")) for value in about["args"]]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def open(self, page: Path, width: int = 1240, height: int = 900) -> None:
        """Load a page, and wait until its charts are drawn."""
        self.problems.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=page.resolve().as_uri())
        try:
            _wait(lambda: self.run("document.documentElement?.dataset.ready === 'true'"))
        except TimeoutError as error:
            raise TimeoutError(f"the page was not ready in time; its console has {self.problems}") from error

    def run(self, script: str) -> object:
        """Return the value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, such as ``ArrowRight`` or ``Tab``, where the focus is."""
        codes = {"Tab": 9, "Enter": 13, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def theme(self, name: str) -> None:
        """Show the page as light, dark or printed."""
        scheme = "dark" if name == "dark" else "light"
        self.call(
            "Emulation.setEmulatedMedia",
            media="print" if name == "print" else "screen",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def picture(self, file: Path, selector: str | None = None, height: int | None = None) -> None:
        """Write a PNG of the whole page, or of one element, or of so many pixels of it from the top."""
        where = f"document.querySelector({json.dumps(selector or 'html')}).getBoundingClientRect()"
        box = self.run(f"(() => {{ const b = {where}; return [b.x + scrollX, b.y + scrollY, b.width, b.height] }})()")
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
        clip["height"] = min(clip["height"], height or clip["height"])
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, file: Path) -> None:
        """Print the page."""
        answer = self.call("Page.printToPDF", printBackground=False)
        file.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        self._process.terminate()
        self._process.wait(10)
        self._home.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _wait(ask, seconds: float = 60.0):
    """Return the first answer that is something; raise TimeoutError when there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            answer = ask()
        except (OSError, IndexError):
            answer = None
        if answer:
            return answer
        time.sleep(0.05)
    raise TimeoutError("the browser did not answer in time")


if __name__ == "__main__":
    page, file, *more = sys.argv[1:]
    theme, width, selector = [*more, *("light", "1240", "")[len(more) :]]
    with Browser() as browser:
        browser.theme(theme)
        browser.open(Path(page), int(width))
        browser.picture(Path(file), selector or None)
        for problem in browser.problems:
            print(problem)
