"""`coremill bench peer`: servers and programs that stand for other engines, with a make-believe `coremill run`."""

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from coremill.config.errors import ConfigError, EngineError
from coremill.config.settings import from_command_line
from coremill.tools.bench import peer as bench_peer
from coremill.tools.bench import rounds
from coremill.tools.bench.peer import peer_engines, run_coremill
from coremill.tools.bench.program import render_prompts, run_program
from coremill.tools.bench.rounds import Engine, Run, compare, how_it_ended
from coremill.tools.bench.server import Server, read_requests, run_llama, run_server
from coremill.tools.peers import table

from .fake_peers import FAKES, Answers, make_program


@pytest.fixture
def server():
    made = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
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
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"prompt": "once", "max_tokens": 5, "temperature": 0},
        {"messages": chat["messages"], "max_tokens": 5, "model": "x", "temperature": 0},
    ]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def settings(tmp_path, **given):
    return from_command_line("bench peer", {"model": "m.gguf"} | given, {"HOME": str(tmp_path)})


# ---- servers ----


def test_rows_become_requests(workload):
    requests = read_requests(workload)
    assert [request.path for request in requests] == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/chat/completions",
    ]
    assert requests[1].body == {"prompt": "once", "max_tokens": 5, "temperature": 0}
    assert "model" not in requests[2].body


def test_only_line_feeds_end_a_row(tmp_path, smollm2_pack):
    """JSON strings may hold Unicode's other line ends as they are; numbers in messages are those of an editor."""
    row = {"prompt": "a\u2028b\u2029c\x85d", "max_tokens": 1, "temperature": 0}
    (tmp_path / "rows").write_bytes(f"\n{json.dumps(row, ensure_ascii=False)}\r\n".encode())
    (request,) = read_requests(tmp_path / "rows")
    assert request.body == row
    (prompt,) = render_prompts(tmp_path / "rows", str(smollm2_pack))
    assert prompt.text == row["prompt"]
    (tmp_path / "rows").write_bytes(b'{"prompt": "\xe2\x80\xa8", "max_tokens": 1, "temperature": 0}\n[1]\n')
    for read in (read_requests, lambda path: render_prompts(path, str(smollm2_pack))):
        with pytest.raises(ConfigError, match=r"rows: line 2\b"):
            read(tmp_path / "rows")


@pytest.mark.parametrize(("text", "message"), [("[1]", "line 1 is no request"), ("{", "line 1"), ("\n", "no requests")])
def test_files_that_are_no_workload(tmp_path, text, message):
    (tmp_path / "bad").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_requests(tmp_path / "bad")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_every_request_is_sent_once(server, workload, suffix):
    made = Server(f"http://127.0.0.1:{server.server_port}{suffix}")
    run = run_server(made, read_requests(workload), concurrency=2)
    assert (run.rows, run.errors, run.prompt_tokens, run.completion_tokens) == (3, 0, 9, 15)
    assert {body["model"] for _, body in server.seen} == {"tiny"}
    assert sorted(path for path, _ in server.seen).count("/v1/completions") == 1


def test_errors_of_the_server_are_counted(server, tmp_path):
    (tmp_path / "rows").write_text('{"prompt": "fail"}\n{"prompt": "go", "max_tokens": 1}\n')
    run = run_server(Server(f"127.0.0.1:{server.server_port}"), read_requests(tmp_path / "rows"), concurrency=1)
    assert (run.rows, run.errors) == (1, 1)
    assert "status 500" in run.first_error


def test_no_server():
    with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
        Server("ftp://x")
    with pytest.raises(EngineError, match="no answer"):
        Server("http://127.0.0.1:1")


def test_a_server_takes_no_program(server, tmp_path, workload):
    url = f"http://127.0.0.1:{server.server_port}"
    (engine,) = peer_engines(url, workload, settings(tmp_path))
    assert engine.name == "peer tiny" and engine.call().rows == 3
    with pytest.raises(ConfigError, match="--peer-program is 'x': the server at"):
        peer_engines(url, workload, settings(tmp_path, peer_program="x"))


# ---- llama.cpp ----


def test_llama_is_started_for_each_run_and_ended(tmp_path, workload):
    program, pids = make_program(tmp_path, "llama"), tmp_path / "pids"
    for _ in range(2):
        run = run_llama(program, Path("tiny.gguf"), 2, read_requests(workload), concurrency=4)
        assert (run.rows, run.errors, run.completion_tokens) == (3, 0, 15)
        assert run.ready_seconds > 0
    arguments = [line.split() for line in pids.read_text().splitlines()]
    assert [line[1:10] for line in arguments] == [
        ["-m", "tiny.gguf", "-t", "2", "-np", "4", "-c", "14336", "--no-kv-unified"]
    ] * 2
    assert not any(Path("/proc", line[0]).exists() for line in arguments)


def test_llama_that_does_not_start_says_why(tmp_path, workload):
    requests = read_requests(workload)
    with pytest.raises(EngineError, match=r"ended with code 3: cannot read missing\.gguf"):
        run_llama(make_program(tmp_path, "llama"), Path("missing.gguf"), 2, requests, 4)
    with pytest.raises(EngineError, match="nowhere: No such file"):
        run_llama(str(tmp_path / "nowhere"), Path("tiny.gguf"), 2, requests, 4)


def test_llama_runs_once_for_each_file(tmp_path, workload, smollm2_gguf):
    given = {"model": str(smollm2_gguf), "peer_program": "llama-server", "peer_model": "other-q4_0.gguf"}
    names = [engine.name for engine in peer_engines("llama.cpp", workload, settings(tmp_path, **given))]
    assert names == ["llama.cpp SmolLM2-135M-Instruct.Q4_1", "llama.cpp other-q4_0"]


def test_how_processes_end():
    assert how_it_ended(-4, b"") == "was killed by SIGILL (built for another CPU?): no message"
    assert how_it_ended(-9, b"one\ntwo\n") == "was killed by SIGKILL: two"
    assert how_it_ended(2, b"x" * 400).endswith(" code 2: " + "x" * 300)


# ---- libraries ----


def test_prompts_are_the_models_own(workload, smollm2_pack):
    prompts = render_prompts(workload, str(smollm2_pack))
    assert prompts[1].text == "once" and prompts[1].max_tokens == 5
    assert prompts[0].text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert prompts[0] == prompts[2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "max_tokens": 1}, "line 1: 'temperature' is 1: with a library as the peer it must be 0"),
        ({"prompt": "x", "temperature": 0}, "'max_tokens' is missing"),
        ({"prompt": "x", "max_tokens": 1, "temperature": 0, "stop": "y"}, "'stop' is given"),
        ({"prompt": [1, 2], "max_tokens": 1, "temperature": 0}, "'prompt' holds token ids"),
        ({"prompt": "x", "max_token": 1}, "'max_token' is not a field"),
    ],
)
def test_rows_that_a_library_cannot_be_asked(tmp_path, smollm2_pack, row, message):
    (tmp_path / "rows").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=message):
        render_prompts(tmp_path / "rows", str(smollm2_pack))


@pytest.mark.parametrize("name", ["openvino", "vllm"])
def test_libraries_as_they_come_and_strong(tmp_path, workload, smollm2_pack, name):
    python = make_program(tmp_path, name)
    prompts = render_prompts(workload, str(smollm2_pack))
    script = f"run_{name}.py"
    plain = run_program(python, script, "tiny", prompts, strong=False, warm_prefix=True)
    strong = run_program(python, script, "tiny", prompts, strong=True, warm_prefix=True)
    for run in (plain, strong):
        num_words = sum(len(prompt.text.split()) for prompt in prompts)
        assert (run.rows, run.errors, run.prompt_tokens, run.completion_tokens) == (3, 0, num_words, 15)
    first, second = (json.loads(line) for line in (tmp_path / "calls").read_text().splitlines())
    # The first call answers what belongs to the start; with strong settings the first row goes alone.
    assert [len(texts) for texts in first["calls"]] == [1, 3]
    assert [len(texts) for texts in second["calls"]] == [1, 1, 2]
    assert second["calls"][1] + second["calls"][2] == [prompt.text for prompt in prompts]
    assert first["prefix_caching"] is False and second["prefix_caching"] is True


def test_a_library_that_fails_says_why(tmp_path, workload, smollm2_pack):
    prompts = render_prompts(workload, str(smollm2_pack))

    def run(python, model):
        run_program(python, "run_openvino.py", model, prompts, strong=False, warm_prefix=False)

    with pytest.raises(EngineError, match=r"run_openvino\.py ended with code 1: .*no such model: missing"):
        run(make_program(tmp_path, "openvino"), "missing")
    with pytest.raises(EngineError, match="nowhere: No such file"):
        run(str(tmp_path / "nowhere"), "tiny")


def test_settings_of_libraries(tmp_path, workload, smollm2_pack):
    def names(peer, **given):
        made = settings(tmp_path, model=str(smollm2_pack), **given)
        return [engine.name for engine in peer_engines(peer, workload, made)]

    assert names("openvino", peer_program="p") == ["openvino", "openvino (strong)"]
    assert names("vllm", peer_program="p", peer_model="f", peer_settings="strong") == ["vllm (strong)"]
    with pytest.raises(ConfigError, match="missing option --peer-program"):
        names("openvino")
    with pytest.raises(ConfigError, match="vLLM wants a Hugging Face folder"):
        names("vllm", peer_program="p")


# ---- ours, and the rounds ----


def _fake_run(monkeypatch, script: str) -> None:
    """`coremill run` becomes this piece of Python; its arguments are in sys.argv."""
    real = bench_peer.subprocess.run

    def run(command, **kwargs):
        fake = [command[0], "-c", script, *command[3:]] if command[1:3] == ["-m", "coremill.tools"] else command
        return real(fake, **kwargs)

    monkeypatch.setattr(bench_peer.subprocess, "run", run)


_WRITES_STATS = """
import json, sys
args = sys.argv[1:]
stats = {"seconds": 2.0, "rows": 3, "errors": 0, "prompt_tokens": 9, "completion_tokens": len(args),
         "startup_seconds": 0.5}
json.dump(stats, open(args[args.index("--stats") + 1], "w"))
"""


def test_coremill_is_run_with_the_engines_options(monkeypatch, tmp_path, workload):
    _fake_run(monkeypatch, _WRITES_STATS)
    run = run_coremill(workload, settings(tmp_path, workers="1", prefix_cache=False))
    # run FILE -m M -o OUT --stats S --workers 1 --no-prefix-cache
    assert run == Run("coremill", 2.0, 3, 0, 9, 11, ready_seconds=0.5)


def test_coremill_that_fails_is_an_error(monkeypatch, tmp_path, workload):
    _fake_run(monkeypatch, "import sys; print('first\\ncoremill: no such model', file=sys.stderr); sys.exit(1)")
    with pytest.raises(EngineError, match="coremill run ended with code 1: coremill: no such model"):
        run_coremill(workload, settings(tmp_path))


def test_rounds_alternate_and_medians_are_of_ratios(monkeypatch):
    monkeypatch.setattr(rounds.time, "sleep", lambda seconds: None)
    order, lines = [], []
    ours, theirs, others = iter([1.0, 2.0, 1.0]), iter([3.0, 8.0, 2.0]), iter([1.0, 1.0, 1.0])

    def run(engine, seconds):
        order.append(engine)
        return Run(engine, next(seconds), 3, 1 if len(order) == 9 else 0, 9, 14)

    peers = [Engine("a", lambda: run("a", theirs)), Engine("b", lambda: run("b", others))]
    result = compare(3, lambda: run("coremill", ours), peers, lines.append)
    assert order == ["coremill", "a", "b", "b", "a", "coremill", "coremill", "a", "b"]
    assert [entry["ratios"] for entry in result["rounds"]] == [{"a": 3.0, "b": 1.0}, {"a": 4.0, "b": 0.5},
                                                                {"a": 2.0, "b": 1.0}]  # fmt: skip
    assert result["median"] == {"seconds": {"coremill": 1.0, "a": 3.0, "b": 1.0}, "ratios": {"a": 3.0, "b": 1.0}}
    assert any("round 3, b: 1 rows failed" in warning for warning in result["warnings"])
    assert lines[-1].startswith("median: coremill 1.00 s, a 3.00 s, b 1.00 s; coremill is 3.00 x as fast as a")


def test_the_table_of_all_peers(monkeypatch, tmp_path, workload, smollm2_gguf, capsys):
    monkeypatch.setattr(rounds.time, "sleep", lambda seconds: None)
    _fake_run(monkeypatch, _WRITES_STATS)
    arguments = ["-m", str(smollm2_gguf), str(workload), "--rounds", "1", "--json", str(tmp_path / "table.json")]
    for name in FAKES:
        arguments += [f"--{name}", make_program(tmp_path, name)]
    table.main([*arguments, "--llama-model", "tiny-q4_0.gguf", "--vllm-model", "tiny"])
    said = capsys.readouterr().out.splitlines()
    engines = "coremill | llama.cpp SmolLM2-135M-Instruct.Q4_1 | llama.cpp tiny-q4_0 | openvino | openvino (strong)"
    assert said[0] == f"| file | {engines} | vllm (strong) |"
    assert said[2].startswith("| rows.jsonl, 3 rows | 2.00 | ") and said[2].count(" x)") == 5
    assert said[6] == "| rows.jsonl | 8 | 15 | 15 | 15 | 15 | 15 |"
    (saved,) = json.loads((tmp_path / "table.json").read_text())
    assert list(saved["rounds"][0]["runs"]) == list(saved["median"]["seconds"])
    with pytest.raises(SystemExit):
        table.main(["-m", "x", str(workload)])


def test_what_rows_share():
    def shared(*texts):
        return table.mostly_shared([table.Prompt(text, 1) for text in texts])

    assert shared("the same and a", "the same and b", "the same and c")
    assert not shared("the a", "the b and more and more")
    assert not shared("only one")
