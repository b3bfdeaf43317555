"""What the client does with the errors of etcd's gateway, of all versions."""

import collections
import http.server
import json
import threading

import pytest

from optax_dist.coordinator.extras.etcd import client, keys

_DONE = 200, {"header": {"cluster_id": "1", "revision": "1"}}


class _Gateway(http.server.ThreadingHTTPServer):
  """Gives the answers that a test sets; then each request succeeds.

  Attributes:
    answers: status and body of the next answers, except to logins.
    asked: path and token of each request so far.
  """

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.answers = collections.deque()
    self.requested = []
    self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
    self._thread.start()

  def answer(self, path, token):
    self.requested.append((path, token))
    if path == "/v3/auth/authenticate":
      logins = [path for path, _ in self.requested].count(path)
      return 200, {**_DONE[1], "token": f"token {logins}"}
    return self.answers.popleft() if self.answers else _DONE

  def close(self):
    self.shutdown()
    self._thread.join()
    self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def do_POST(self):
    self.rfile.read(int(self.headers["Content-Length"]))
    token = self.headers["Authorization"]
    status, result = self.server.answer(self.path, token)
    is_text = isinstance(result, str)
    body = (result if is_text else json.dumps(result)).encode()
    self.send_response(status)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *_):
    pass


@pytest.fixture
def gateway():
  made = _Gateway()
  yield made
  made.close()


@pytest.fixture(params=["3.5", "3.6"])
def error(request):
  """A function that makes the body of an error, as this version does."""

  def make(code, message):
    result = {"code": code, "message": message}
    return {"error": message, **result} if request.param == "3.5" else result

  return make


def _put(gateway, timeout=200.0, **login):
  """Makes one request."""
  where = keys.Etcd((f"127.0.0.1:{gateway.server_port}",), **login)
  with client.Client(where) as asked:
    return asked.ask("kv/put", {"key": "YQ=="}, timeout)


@pytest.mark.parametrize(
  ("status", "code", "message"),
  [
    (503, 14, "etcdserver: no leader"),
    (503, 14, "etcdserver: request timed out"),
    (429, 8, "etcdserver: too many requests"),
  ],
)
def test_a_request_is_repeated_after_an_error_that_passes(
  gateway, error, status, code, message
):
  gateway.answers += [(status, error(code, message))] * 2
  assert _put(gateway) == _DONE[1]
  assert len(gateway.requested) == 3


@pytest.mark.parametrize("body", [{"errors": ["bad gateway"]}, "<html>"])
def test_an_error_of_a_proxy_is_repeated(gateway, body):
  gateway.answers.append((502, body))
  assert _put(gateway) == _DONE[1]


@pytest.mark.parametrize(
  ("status", "body"),
  [
    (501, "<html>"),
    (404, "Not found"),
    (200, []),
    # Other servers that answer in JSON.
    (404, {"message": "Not Found", "code": 404}),
    (401, {"error": "unauthorized"}),
    (200, {"ok": True}),
    (200, {"kvs": None}),
    (200, "[" * 10_000),
  ],
)
def test_server_that_is_not_etcd_is_named_at_once(gateway, status, body):
  gateway.answers.append((status, body))
  said = (
    f"127.0.0.1:{gateway.server_port}: what answers there is no etcd .*{status}"
  )
  with pytest.raises(client.Rejected, match=said):
    _put(gateway)
  assert len(gateway.requested) == 1


@pytest.mark.parametrize(
  ("status", "code", "message"),
  [
    (400, 3, "etcdserver: user name is empty"),
    (403, 7, "etcdserver: permission denied"),
    (429, 8, "etcdserver: mvcc: database space exceeded"),
  ],
)
def test_a_refused_request_is_not_repeated(
  gateway, error, status, code, message
):
  gateway.answers.append((status, error(code, message)))
  with pytest.raises(client.Rejected, match=message):
    _put(gateway)
  assert len(gateway.requested) == 1


def test_timeout_quotes_the_last_error_of_etcd(gateway, error):
  gateway.answers += [(503, error(14, "etcdserver: no leader"))] * 99
  with pytest.raises(client.NoAnswer, match="etcdserver: no leader"):
    _put(gateway, timeout=0.5)


@pytest.mark.parametrize(
  ("status", "code", "message"),
  [
    (401, 16, "etcdserver: invalid auth token"),
    # A token of JSON is of one revision of users and roles.
    (400, 3, "etcdserver: revision of auth store is old"),
    (500, 2, "auth: revision in header is old"),
  ],
)
def test_a_client_logs_in_again_when_its_token_is_no_longer_valid(
  gateway, error, status, code, message
):
  gateway.answers.append((status, error(code, message)))
  assert _put(gateway, user="root", password="word") == _DONE[1]
  login = "/v3/auth/authenticate", None
  assert gateway.requested == [
    login,
    ("/v3/kv/put", "token 1"),
    login,
    ("/v3/kv/put", "token 2"),
  ]


def test_invalid_request_does_not_cause_another_login(gateway, error):
  gateway.answers.append((400, error(3, "etcdserver: request is too large")))
  with pytest.raises(client.Rejected, match="too large"):
    _put(gateway, user="root", password="secret")
  assert [path for path, _ in gateway.requested] == [
    "/v3/auth/authenticate",
    "/v3/kv/put",
  ]
