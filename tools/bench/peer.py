"""`coremill bench peer PEER FILE`: the same file through coremill and through another engine, in turns.

    PEER        is                                          started
    URL         any server that speaks OpenAI's API          by you
    llama.cpp   its llama-server, best settings              for each round: a fresh one remembers no prompts
    openvino    OpenVINO GenAI, as it comes and strong       for each round, from its own Python
    vllm        vLLM on the CPU, as it comes and strong      for each round, from its own Python

coremill's seconds are those of its --stats (input opened with all workers ready, to the last result written); a
peer's are from the first request sent to the last answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coremill.config.errors import ConfigError, EngineError
from coremill.config.options import of_group
from coremill.config.settings import Settings
from coremill.tools.bench.program import render_prompts, run_program
from coremill.tools.bench.rounds import OURS, Engine, Run, compare, how_it_ended
from coremill.tools.bench.server import Server, read_requests, run_llama, run_server

LLAMA, OPENVINO, VLLM = "llama.cpp", "openvino", "vllm"
_SCRIPTS = {OPENVINO: "run_openvino.py", VLLM: "run_vllm.py"}


def run_coremill(path: Path, settings: Settings) -> Run:
    """One `coremill run` of the file into a fresh folder. EngineError when it does not finish."""
    with tempfile.TemporaryDirectory(prefix="coremill-bench-") as folder:
        stats_path = Path(folder, "stats.json")
        command = [sys.executable, "-m", "coremill.tools", "run", str(path), "-m", settings.require("model")]
        command += ["-o", str(Path(folder, "out.jsonl")), "--stats", str(stats_path), *_engine_switches(settings)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if not stats_path.exists():
            raise EngineError(f"coremill run {how_it_ended(done.returncode, done.stderr)}")
        stats = json.loads(stats_path.read_text())
    names = ("seconds", "rows", "errors", "prompt_tokens", "completion_tokens")
    return Run(OURS, *(stats[name] for name in names), ready_seconds=stats.get("startup_seconds"))


def _engine_switches(settings: Settings) -> list[str]:
    """The engine options given to this command, for the one that is started."""
    switches = []
    for option in of_group("engine"):
        if option.name in settings and settings.given(option.name):
            value = settings[option.name]
            if option.is_flag:
                switches.append(option.switch if value else option.switch.replace("--", "--no-", 1))
            else:
                switches += [option.switch, str(value)]
    return switches


def peer_engines(peer: str, path: Path, settings: Settings) -> list[Engine]:
    """The contestants that a peer's name stands for: a library once for each of its settings, llama.cpp once for
    each model file. ConfigError for what the file, the model or an option cannot be."""
    if peer == LLAMA:
        return _llama_engines(path, settings)
    if peer in _SCRIPTS:
        return _library_engines(peer, path, settings)
    _refuse("peer_program", f"the server at {peer} is yours to start", settings)
    _refuse("peer_model", f"the server at {peer} has its own", settings)
    server, requests = Server(peer), read_requests(path)
    name = "peer" if server.model == "default" else f"peer {Path(server.model).name}"
    return [Engine(name, lambda: run_server(server, requests, settings["concurrency"]))]


def _llama_engines(path: Path, settings: Settings) -> list[Engine]:
    from coremill.config.topology import survey

    program, requests, threads = settings.require("peer_program"), read_requests(path), survey().budget
    models = [_model_file(settings.require("model"))]
    if settings["peer_model"] is not None:
        models.append(Path(settings["peer_model"]))

    def engine(model: Path) -> Engine:
        name = f"{LLAMA} {model.stem}"
        return Engine(name, lambda: run_llama(program, model, threads, requests, settings["concurrency"]))

    return [engine(model) for model in models]


def _library_engines(peer: str, path: Path, settings: Settings) -> list[Engine]:
    python, script = settings.require("peer_program"), _SCRIPTS[peer]
    model = settings["peer_model"]
    if model is None and peer == VLLM:
        raise ConfigError("--peer-model is missing: vLLM wants a Hugging Face folder (tools/peers/gguf_to_folder.py)")
    model = str(Path(model).absolute() if model else _model_file(settings.require("model")))
    prompts, warm = render_prompts(path, settings.require("model")), settings["warm_prefix"]

    def engine(strong: bool) -> Engine:
        name = f"{peer} (strong)" if strong else peer
        return Engine(name, lambda: run_program(python, script, model, prompts, strong=strong, warm_prefix=warm))

    chosen = {"default": [False], "strong": [True], "both": [False, True]}[settings["peer_settings"]]
    return [engine(strong) for strong in chosen]


def _model_file(model: str) -> Path:
    """The file that a peer loads, for a path or a short name."""
    from coremill.native.cache import cache_folder, find_model

    return find_model(model, cache_folder()).absolute()


def _refuse(name: str, why: str, settings: Settings) -> None:
    if settings.given(name):
        raise ConfigError(f"{settings.source(name)} is {settings[name]!r}: {why}")


def bench_peer(peer: str, path: Path, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole comparison; `say` gets a line for each step."""
    settings.require("model")
    engines = peer_engines(peer, path, settings)
    num_rows = len(read_requests(path))
    say(f"{path.name}: {num_rows} requests, against {', '.join(engine.name for engine in engines)}")
    result = compare(settings["rounds"], lambda: run_coremill(path, settings), engines, say)
    return {"file": path.name, "rows": num_rows, "peer": peer} | result
