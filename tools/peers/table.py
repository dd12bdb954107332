"""coremill and its peers over several files, as the Markdown table of docs/performance.md.

    python -m coremill.tools.peers.table -m smollm2 label.jsonl write.jsonl read.jsonl \
        --llama llama-server --llama-model model-q4_0.gguf --openvino VENV/bin/python \
        --vllm VENV/bin/python --vllm-model FOLDER --json table.json > table.md

Give only the peers you have. Each file: --rounds rounds of all engines in turns, medians. Libraries run with their
best settings, OpenVINO also as it comes. Where most of a file's text is common to its rows, they get the first row
alone first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from coremill.config.errors import CoremillError
from coremill.config.settings import from_command_line
from coremill.tools.bench.peer import LLAMA, OPENVINO, VLLM, peer_engines, run_coremill
from coremill.tools.bench.program import Prompt, render_prompts
from coremill.tools.bench.rounds import OURS, Engine, compare

# Rows that have this share of their median length in common are worth computing that part once.
_MOSTLY_SHARED = 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    results = []
    for path in options.files:
        settings = from_command_line("bench peer", {"model": options.model, "kv": options.kv})
        peers = contestants(path, options)
        print(f"{path.name}: {', '.join(peer.name for peer in peers)}", file=sys.stderr)
        found = compare(
            options.rounds,
            lambda path=path, settings=settings: run_coremill(path, settings),
            peers,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
        results.append({"file": path.name} | found)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=2))
    print(table(results))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m coremill.tools.peers.table", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="batch files")
    parser.add_argument("-m", "--model", required=True, help="as for `coremill run`")
    parser.add_argument("--kv", help="KV type of coremill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="OUT", help="write every run's figures to this file, after each input file")
    parser.add_argument("--llama", metavar="PROGRAM", help="llama-server")
    parser.add_argument("--llama-model", metavar="FILE", help="a second file for it, such as one in Q4_0")
    parser.add_argument("--openvino", metavar="PYTHON", help="Python that has openvino-genai")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python that has vllm")
    parser.add_argument("--vllm-model", metavar="FOLDER", help="Hugging Face folder in bf16, by gguf_to_folder.py")
    options = parser.parse_args(arguments)
    if not (options.llama or options.openvino or options.vllm):
        parser.error("give at least one of --llama, --openvino and --vllm")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: it must be at least 1")
    return options


def contestants(path: Path, options: argparse.Namespace) -> list[Engine]:
    """The peers that were given, for one file."""
    warm = mostly_shared(render_prompts(path, options.model)) if options.openvino or options.vllm else False
    found = []
    for peer, program, model, which in (
        (LLAMA, options.llama, options.llama_model, None),
        (OPENVINO, options.openvino, None, "both"),
        (VLLM, options.vllm, options.vllm_model, "strong"),
    ):
        if program:
            given = {"model": options.model, "peer_program": program, "peer_model": model, "peer_settings": which}
            found += peer_engines(peer, path, from_command_line("bench peer", given | {"warm_prefix": warm}))
    return found


def mostly_shared(prompts: Sequence[Prompt]) -> bool:
    """Whether rows begin alike for a good part of their length."""
    texts = [prompt.text for prompt in prompts]
    # What the first and the last in order have in common, all have.
    pairs = zip(min(texts), max(texts), strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return len(texts) > 1 and shared >= _MOSTLY_SHARED * median(map(len, texts))


def table(results: Sequence[dict[str, Any]]) -> str:
    """Seconds of each engine and how many times ours they are; below, tokens of all rows, and what disturbed."""
    engines = list(results[0]["median"]["seconds"])
    lines = [f"| file | {' | '.join(engines)} |", "| --- " * (1 + len(engines)) + "|"]
    for result in results:
        seconds, ratios = result["median"]["seconds"], result["median"]["ratios"]
        cells = [f"{seconds[e]:.2f}" if e == OURS else f"{seconds[e]:.2f} ({ratios[e]:.2f} x)" for e in engines]
        lines.append(f"| {result['file']}, {_rows(result)} rows | {' | '.join(cells)} |")
    lines += ["", f"| completion tokens | {' | '.join(engines)} |", "| --- " * (1 + len(engines)) + "|"]
    for result in results:
        runs = result["rounds"][-1]["runs"]
        lines.append(f"| {result['file']} | {' | '.join(str(runs[e]['completion_tokens']) for e in engines)} |")
    lines += ["", f"| start, seconds | {' | '.join(engines)} |", "| --- " * (1 + len(engines)) + "|"]
    starts = [[run["ready_seconds"] for r in results for o in r["rounds"] for run in [o["runs"][e]]] for e in engines]
    lines.append("| median | " + " | ".join("-" if None in s else f"{median(s):.1f}" for s in starts) + " |")
    runs = [run for result in results for entry in result["rounds"] for run in entry["runs"].values()]
    rounds = len(results[0]["rounds"])
    lines += ["", f"Medians of {rounds} rounds in turns. Before a run the cores were at most"
              f" {max(run['busy'] for run in runs):.0%} busy; the hypervisor took at most"
              f" {max(run['steal'] for run in runs):.1%} of the time of a run."]  # fmt: skip
    lines += [f"\n{result['file']}: {warning}." for result in results for warning in result["warnings"]]
    return "\n".join(lines)


def _rows(result: dict[str, Any]) -> int:
    return result["rounds"][-1]["runs"][OURS]["rows"]


if __name__ == "__main__":
    try:
        main()
    except CoremillError as error:
        sys.exit(f"coremill: {error}")
