"""A small HTTP server in the test's process, for rewards that ask one."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Respond = Callable[[str, Any], tuple[int, str]]


@dataclass
class RewardService:
    """Where it listens and, in the order of their arrival, what was asked: (path, body, header Authorization)."""

    url: str
    asked: list[tuple[str, Any, str | None]] = field(default_factory=list)

    def bodies(self) -> list[Any]:
        return [body for _, body, _ in self.asked]


@contextmanager
def reward_service(respond: Respond) -> Iterator[RewardService]:
    """Answers each request with `respond(path, body)`, a status and a text; the body of a GET is None. Each in its own thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self._answer(None)

        def _answer(self, body: Any) -> None:
            service.asked.append((self.path, body, self.headers["Authorization"]))
            status, text = respond(self.path, body)
            content = text.encode()
            try:
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", text)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has given up

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        service = RewardService(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
