"""A small web server that misbehaves on request."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serves `content` at every path; `requests` lists the Range header of each request (None: no header)."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.requests: list[str | None] = []
        self.ranges = True
        self.lengths = True
        self.cut_after: list[int] = []
        """Bytes after which the first, second, ... answer breaks off."""
        self.failures: list[int] = []
        """HTTP status of the first, second, ... answer; then it works."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/set.tar.gz"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.requests.append(asked)
        if self.server.failures:
            self.send_error(self.server.failures.pop(0))
            return
        content = self.server.content
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and self.server.ranges else 0
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        body = content[start:]
        if self.server.lengths:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.cut_after:
            body = body[: self.server.cut_after.pop(0)]
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""


@contextmanager
def serving(content: bytes) -> Iterator[FileServer]:
    with FileServer(content) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
