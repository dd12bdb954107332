"""`coremill bench peer` against a small server, with a make-believe `coremill run`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coremill.config.errors import ConfigError, EngineError
from coremill.config.settings import from_command_line
from coremill.tools.bench import peer as bench_peer
from coremill.tools.bench.peer import Peer, Run, compare, read_requests, run_coremill, run_peer


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if body.get("prompt") == "fail":
            self._answer(500, {"error": {"message": "no"}})
        else:
            self._answer(200, {"usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}})

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    made.seen = []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def workload(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"prompt": "once", "max_tokens": 7},
        {"messages": chat["messages"], "max_tokens": 2, "model": "x"},
    ]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def settings(tmp_path, **given):
    return from_command_line("bench peer", {"model": "m.gguf"} | given, {"HOME": str(tmp_path)})


def test_rows_become_requests(workload):
    requests = read_requests(workload)
    assert [request.path for request in requests] == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/chat/completions",
    ]
    assert requests[1].body == {"prompt": "once", "max_tokens": 7}
    assert "model" not in requests[2].body


@pytest.mark.parametrize(("text", "message"), [("[1]", "line 1 is no request"), ("{", "line 1"), ("\n", "no requests")])
def test_files_that_are_no_workload(tmp_path, text, message):
    (tmp_path / "bad").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_requests(tmp_path / "bad")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_every_request_is_sent_once(server, workload, suffix):
    peer = Peer(f"http://127.0.0.1:{server.server_port}{suffix}")
    run = run_peer(peer, read_requests(workload), concurrency=2)
    assert (run.rows, run.errors, run.prompt_tokens, run.completion_tokens) == (3, 0, 9, 14)
    assert {body["model"] for _, body in server.seen} == {"tiny"}
    assert sorted(path for path, _ in server.seen).count("/v1/completions") == 1


def test_errors_of_the_server_are_counted(server, tmp_path):
    (tmp_path / "rows").write_text('{"prompt": "fail"}\n{"prompt": "go", "max_tokens": 1}\n')
    run = run_peer(Peer(f"127.0.0.1:{server.server_port}"), read_requests(tmp_path / "rows"), concurrency=1)
    assert (run.rows, run.errors) == (1, 1)
    assert "status 500" in run.first_error


def test_no_server():
    with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
        Peer("ftp://x")
    with pytest.raises(EngineError, match="no answer"):
        Peer("http://127.0.0.1:1")


def _fake_run(monkeypatch, script: str) -> None:
    """`coremill run` becomes this piece of Python; its arguments are in sys.argv."""
    real = bench_peer.subprocess.run

    def run(command, **kwargs):
        return real([command[0], "-c", script, *command[3:]], **kwargs)

    monkeypatch.setattr(bench_peer.subprocess, "run", run)


def test_coremill_is_run_with_the_engines_options(monkeypatch, tmp_path, workload):
    script = """
import json, sys
args = sys.argv[1:]
stats = {"seconds": 2.0, "rows": 3, "errors": 0, "prompt_tokens": 9, "completion_tokens": len(args), "args": args}
json.dump(stats, open(args[args.index("--stats") + 1], "w"))
"""
    _fake_run(monkeypatch, script)
    run = run_coremill(workload, settings(tmp_path, workers="1", prefix_cache=False))
    # run FILE -m M -o OUT --stats S --workers 1 --no-prefix-cache
    assert run == Run("coremill", 2.0, 3, 0, 9, 11)


def test_coremill_that_fails_is_an_error(monkeypatch, tmp_path, workload):
    _fake_run(monkeypatch, "import sys; print('first\\ncoremill: no such model', file=sys.stderr); sys.exit(1)")
    with pytest.raises(EngineError, match="coremill run ended with code 1: coremill: no such model"):
        run_coremill(workload, settings(tmp_path))


def test_rounds_alternate_and_medians_are_of_ratios(monkeypatch):
    monkeypatch.setattr(bench_peer.time, "sleep", lambda seconds: None)
    order, lines = [], []
    ours, theirs = iter([1.0, 2.0, 1.0]), iter([3.0, 8.0, 2.0])

    def run(engine, seconds):
        order.append(engine)
        return Run(engine, next(seconds), 3, 1 if len(order) == 6 else 0, 9, 14)

    result = compare(3, lambda: run("coremill", ours), lambda: run("peer", theirs), lines.append)
    assert order == ["coremill", "peer", "peer", "coremill", "coremill", "peer"]
    assert [entry["ratio"] for entry in result["rounds"]] == [3.0, 4.0, 2.0]
    assert result["median"] == {"coremill": 1.0, "peer": 3.0, "ratio": 3.0}
    assert any("round 3, peer: 1 rows failed" in warning for warning in result["warnings"])
    assert len(lines) == 9
