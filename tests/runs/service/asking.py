"""Plain HTTP for tests: what a stranger would send."""

import http.client
import json
import urllib.parse


class Answer:
    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self):
        return json.loads(self.body)


def ask(url, method, path, body=None, *, token=None, headers=None, raw=None):
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    sent = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = raw if body is None else json.dumps(body).encode()
    if body is not None:
        sent["Content-Type"] = "application/json"
    try:
        connection.request(method, path, body=data, headers={**sent, **(headers or {})})
        return Answer(connection.getresponse())
    finally:
        connection.close()
