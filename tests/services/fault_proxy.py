"""An HTTP proxy in front of an S3 server that does what bad networks and overloaded servers do."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Matcher = Callable[[str, str], bool]


@dataclass
class Fault:
    """What happens to the next `count` requests that `matches` (method, path) picks; None for all of them.

    Kinds:
        error: answered with `status`, the S3 error `code` and `message`; the server never sees the request.
        reset: the connection is reset before the server sees the request.
        lost: the server does it, then the connection is reset instead of the answer.
        cut: the server does it, and the answer's body ends after half its bytes.
        slow: the server does it after `seconds`.
        silent: nothing is answered, for `seconds`; the server never sees it.
        short: the server gets half of the request's body, then its connection is closed, and the client's is reset.
    """

    kind: str
    count: int | None = 1
    status: int = 500
    code: str = "InternalError"
    seconds: float = 0.0
    message: str = ""
    matches: Matcher = lambda method, path: True


@dataclass
class FaultProxy:
    """A running proxy: `endpoint` is what clients are given, `inject` and `clear` tell it what to do."""

    endpoint: str
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, kind of fault or ""
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def inject(self, *faults: Fault) -> None:
        """Add faults; a request meets the first that matches it and is not used up."""
        with self._lock:
            self._faults += faults

    def clear(self) -> None:
        """Forget faults and the requests seen."""
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def _next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.count != 0 and fault.matches(method, path):
                    fault.count = None if fault.count is None else fault.count - 1
                    self.requests.append((method, path, fault.kind))
                    return fault
            self.requests.append((method, path, ""))
            return None


def puts(name: str) -> Matcher:
    """Return a matcher of PUT requests whose path holds `name`."""
    return lambda method, path: method == "PUT" and name in path


def gets(name: str) -> Matcher:
    """Return a matcher of GET requests whose path holds `name`."""
    return lambda method, path: method == "GET" and name in path


@contextlib.contextmanager
def run_fault_proxy(target: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of the endpoint `target` (`http://host:port`)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    proxy = FaultProxy(f"http://127.0.0.1:{server.server_port}")
    server.proxy = proxy  # type: ignore[attr-defined]
    server.target = urlsplit(target).netloc  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client went away, which is its right
            super().handle_one_request()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.proxy._next_fault(self.command, self.path)  # type: ignore[attr-defined]
        kind = fault.kind if fault else ""
        if fault and kind in ("slow", "silent"):
            time.sleep(fault.seconds)
        if fault and kind == "error":
            return self._answer_error(fault)
        if kind == "short":
            self._send_half(body)
        if kind in ("reset", "silent", "short"):
            return self._reset()
        status, headers, answer = self._ask_server(body)
        if kind == "lost":
            return self._reset()
        self._answer(status, headers, answer, cut=kind == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay

    def _ask_server(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=60)  # type: ignore[attr-defined]
        try:
            self._send_head(connection)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _send_head(self, connection: http.client.HTTPConnection) -> None:
        """Send the request's head as it came: the client has signed its Host."""
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection"):
                connection.putheader(name, value)

    def _send_half(self, body: bytes) -> None:
        connection = http.client.HTTPConnection(self.server.target, timeout=60)  # type: ignore[attr-defined]
        self._send_head(connection)
        connection.endheaders(body[: len(body) // 2])
        connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def _answer_error(self, fault: Fault) -> None:
        text = f"<Error><Code>{fault.code}</Code><Message>{fault.message or fault.code}</Message></Error>"
        body = text.encode() if self.command != "HEAD" else b""
        self.send_response_only(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        self.close_connection = True
        # No lingering: the system answers with RST, not with an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()
