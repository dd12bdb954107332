"""Stand-ins for other engines: a server that answers at once, and Pythons that have fake libraries.

`make_program(folder, name)` writes an executable: "llama" behaves like llama-server, "openvino" and "vllm" like the
Python of an environment with that library. Every token of a prompt is a word; answers are as long as they may be.
"""

import json
import os
import runpy
import sys
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAKES = ("llama", "openvino", "vllm")


def make_program(folder: Path, name: str) -> str:
    path = folder / f"fake-{name}"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} {folder} "$@"\n')
    path.chmod(0o755)
    return str(path)


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer(200, {"status": "ok"} if self.path == "/health" else {"data": [{"id": "tiny"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if body.get("prompt") == "fail":
            self._answer(500, {"error": {"message": "no"}})
        else:
            self._answer(200, {"usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}})

    def log_message(self, *args):
        pass


def llama(folder: Path, arguments: list[str]) -> None:
    with open(folder / "pids", "a") as file:
        print(os.getpid(), *arguments, file=file)
    model = arguments[arguments.index("-m") + 1]
    if "missing" in model:
        print(f"loading\ncannot read {model}", file=sys.stderr)
        sys.exit(3)
    server = ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Answers)
    server.seen = []
    server.serve_forever()


class Calls:
    """What a fake library was asked, written as one line of JSON when its process ends."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.prefix_caching, self.folder = [], False, folder

    def write(self) -> None:
        with open(self.folder / "calls", "a") as file:
            print(json.dumps({"calls": self.calls, "prefix_caching": self.prefix_caching}), file=file)


def openvino(seen: Calls) -> types.ModuleType:
    made = types.ModuleType("openvino_genai")
    made.SchedulerConfig = made.GenerationConfig = types.SimpleNamespace

    class LLMPipeline:
        def __init__(self, model, device, scheduler_config):
            if model == "missing":
                raise RuntimeError("no such model: missing")
            seen.prefix_caching = getattr(scheduler_config, "enable_prefix_caching", False)

        def get_tokenizer(self):
            def encode(text):
                return types.SimpleNamespace(input_ids=types.SimpleNamespace(shape=(1, len(text.split()))))

            return types.SimpleNamespace(encode=encode)

        def generate(self, texts, config):
            assert config.do_sample is False and config.apply_chat_template is False
            seen.calls.append(texts)
            count = len(texts) * config.max_new_tokens
            metrics = types.SimpleNamespace(get_num_generated_tokens=lambda: count)
            return types.SimpleNamespace(texts=texts, perf_metrics=metrics)

    made.LLMPipeline = LLMPipeline
    return made


def vllm(seen: Calls) -> types.ModuleType:
    made = types.ModuleType("vllm")
    made.SamplingParams = types.SimpleNamespace

    class LLM:
        def __init__(self, model, dtype, **strong):
            seen.prefix_caching = strong.get("enable_prefix_caching", False)

        def generate(self, texts, params, use_tqdm):
            seen.calls.append(texts)
            params = params if isinstance(params, list) else [params] * len(texts)
            assert all(each.temperature == 0 for each in params)
            return [
                types.SimpleNamespace(
                    prompt_token_ids=text.split(), outputs=[types.SimpleNamespace(token_ids=range(each.max_tokens))]
                )
                for text, each in zip(texts, params, strict=True)
            ]

    made.LLM = LLM
    return made


def python(name: str, folder: Path, arguments: list[str]) -> None:
    """Runs `-I SCRIPT ARGUMENTS` with the fake library in place."""
    seen = Calls(folder)
    module = {"openvino": openvino, "vllm": vllm}[name](seen)
    sys.modules[module.__name__] = module
    os.environ["PEER_READY"] = "1"
    assert arguments[0] == "-I"
    sys.argv = arguments[1:]
    try:
        runpy.run_path(arguments[1], run_name="__main__")
    finally:
        seen.write()


if __name__ == "__main__":
    name, folder, *rest = sys.argv[1:]
    llama(Path(folder), rest) if name == "llama" else python(name, Path(folder), rest)
