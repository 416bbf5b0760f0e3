"""A program that behaves to its owner like an SGLang server, without SGLang: HTTP, a scheduler and a detokenizer process.

Arguments: PARENT_PID PORT [--silent-after N]. It answers every call with the JSON of the calls so far; after N calls it hangs.
"""

import http.server
import json
import os
import subprocess
import sys
import time

from slime_ppo.rollout.sglang.serve import end_with_parent

CHILDREN = ("sglang::scheduler", "sglang::detokenizer")


class Handler(http.server.BaseHTTPRequestHandler):
    calls: list[str] = []
    limit = int(sys.argv[4]) if sys.argv[3:4] == ["--silent-after"] else 10**9

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if len(self.calls) >= self.limit:
            time.sleep(1000)
        self.calls.append(self.path)
        content = json.dumps({"calls": self.calls, "key": self.headers.get("Authorization"), "tp_size": 3}).encode()
        status = int(self.path.removeprefix("/status/")) if self.path.startswith("/status/") else 200
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    children = [subprocess.Popen([name, "1000"], executable="/bin/sleep") for name in CHILDREN]
    sys.stdout.write(f"pids {os.getpid()} {' '.join(str(child.pid) for child in children)}\n")
    sys.stdout.flush()
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
