"""Stands in for uvicorn: serves `app.answer(path, body)` over HTTP."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer


def run(app, host, port, log_level):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, {"message": "welcome"})

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            try:
                self._send(200, {"output": app.answer(self.path[1:], body)})
            except Exception as error:  # As uvicorn answers.
                self._send(500, f"Internal Server Error {error}")

        def _send(self, status, value):
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    HTTPServer((host, port), Handler).serve_forever()
