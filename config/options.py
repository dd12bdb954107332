"""The one table of options: of every verb of the command line, of the environment, of TOML files and of Python.

An option `max_active` is `--max-active` on the command line, `COREMILL_MAX_ACTIVE` in the environment,
`max_active` in a TOML file and a keyword of `Coordinator`. A flag also has its opposite: `--no-prefix-cache`,
`COREMILL_NO_PREFIX_CACHE=1`, `no_prefix_cache = true`. The first source that names an option wins:

    command line (in Python: keywords)
    environment
    --config FILE
    coremill.toml in the current folder
    user's file: $XDG_CONFIG_HOME/coremill/config.toml (default ~/.config)
    the default

Python reads no files unless it is given one with `config=`. docs/options.md is written from this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coremill.config.errors import ConfigError
from coremill.config.kinds import Choice, Flag, Integer, Kind, Number, Size, Stops, Text

ENV_PREFIX = "COREMILL_"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table.

    Attributes:
        name: as in TOML and Python.
        kind: how values are read and checked, and their limits.
        default: None when it is decided later; `default_text` then says how.
        verbs: the commands that have it.
        group: "engine" (a field of EngineConfig), "sampling" (a field of SamplingParams: what rows that say
            nothing get) or "command".
        short: one-letter form on the command line.
        in_files: may stand in a TOML file.
        verb_help: verb -> (help, default text) where a verb takes the option otherwise than the rest.
        required: verbs that cannot do without it.
        spoken_only: verbs that take it from the command line alone.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    verbs: tuple[str, ...]
    group: str = "command"
    short: str | None = None
    default_text: str = ""
    in_files: bool = True
    verb_help: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    spoken_only: tuple[str, ...] = ()

    @property
    def switch(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def is_flag(self) -> bool:
        return isinstance(self.kind, Flag)

    def help_for(self, verb: str) -> str:
        return self.verb_help[verb][0] if verb in self.verb_help else self.help

    def default_for(self, verb: str) -> str:
        """The default in words, for a verb's help."""
        return self.verb_help[verb][1] if verb in self.verb_help else self.shown_default

    @property
    def shown_default(self) -> str:
        if self.default is None or self.default == ():
            return self.default_text
        if self.is_flag:
            return "yes" if self.default else "no"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in files and, in capitals, in the environment."""
        return (self.name, f"no_{self.name}") if self.is_flag else (self.name,)

    def read(self, text: str, where: str) -> Any:
        """The value of a text from the command line or the environment. `where` names it in the error."""
        return self._value(self.kind.read, text, where)

    def check(self, value: Any, where: str) -> Any:
        """A value that has a type already, from TOML or Python."""
        return self._value(self.kind.check, value, where)

    def _value(self, convert: Any, value: Any, where: str) -> Any:
        try:
            return convert(value)
        except ValueError:
            raise ConfigError(f"{where} is {_shown(value)}: it must be {self.kind.limit}") from None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of more than 4300 digits"
    return text if len(text) <= 80 else text[:80] + "..."


# A verb's options are those whose row names it.
_ENGINE = ("run", "up", "bench peer")
_STEPS = (*_ENGINE, "bench", "bench shape", "bench workers")
_RUNS = ("bench start", "bench tail", "bench queue", "bench workers")
_MODEL = (*_ENGINE, "bench", *_RUNS, "perplexity", "pack", "inspect")
_BENCHES = (
    "bench",
    "bench start",
    "bench tail",
    "bench queue",
    "bench peer",
    "bench shape",
    "bench workers",
    "bench coordinator",
    "bench estimate",
)

OPTIONS: tuple[Option, ...] = (
    Option("model", Text("MODEL"), None, "Model: a GGUF file, or a short name that is fetched once (smollm2).",
           _MODEL, short="-m", default_text="none",
           verb_help={"bench": ("Model to measure.", "none, needed for all but --roofline")},
           required=("run", "up", "bench peer", *_RUNS, "perplexity")),
    # ---- the engine: fields of EngineConfig ----
    Option("workers", Integer(1, 4096), None, "Worker processes.",
           (*_STEPS, "bench tail", "bench queue", "bench coordinator"), "engine",
           default_text="one for each core group",
           verb_help={"bench workers": ("The most worker processes that are tried.", "one for each core group"),
                      "bench coordinator": ("Make-believe workers.", "192")}),
    Option("cores_per_worker", Integer(1, 4096, "K"), None,
           "Physical cores in each worker's core group, which run a step together.",
           (*_STEPS, "perplexity"), "engine", default_text="1",
           verb_help={"perplexity": ("Physical cores that compute together.", "all")}),
    Option("max_active", Integer(1, 1024, "B"), 16, "Sequences that a worker steps together.",
           (*_ENGINE, "bench tail", "bench workers", "bench coordinator"), "engine"),
    Option("ctx", Integer(2, 1 << 30, "T"), None,
           "Longest request, prompt and completion together, in tokens.", (*_ENGINE, "perplexity"), "engine",
           default_text="the model's context length, at most 4096",
           verb_help={"perplexity": ("Tokens of a chunk, which starts without anything before it.", "512")}),
    Option("arena", Size(), None, "Memory for the KV cache of all sequences together.",
           _ENGINE, "engine", default_text="room for all active sequences, at most half of the memory left"),
    Option("kv", Choice(("f16", "q8")), "f16",
           "Type of the KV cache: f16, or q8, which takes half the memory and computes on 8-bit integers.",
           (*_STEPS, "perplexity"), "engine"),
    Option("seed", Integer(-(2**63), 2**63 - 1, "S"), 0,
           "Seed of the run, from which rows without a seed draw theirs.", ("run", "up"), "engine"),
    Option("prefix_cache", Flag(), True, "Share the computed prefixes of prompts.", _ENGINE, "engine"),
    Option("lending", Flag(), True,
           "Workers with nothing to run lend their cores to others, where measuring says that it is faster.",
           (*_ENGINE, "bench tail"), "engine"),
    Option("step_tokens", Integer(1, 8192), 128,
           "Tokens of one step, which is also the longest piece of a prompt computed at once.",
           (*_STEPS, "perplexity"), "engine"),
    Option("profile", Flag(), False, "Time each operation and print the table.", ("run",), "engine"),
    Option("stuck_after", Number(1, 86400, "SECONDS"), 10.0,
           "Kill a worker that has work but completes no operation for this long; its rows go on elsewhere.",
           ("run", "up"), "engine"),
    # ---- what rows get that say nothing: fields of SamplingParams ----
    Option("max_tokens", Integer(1, 2**31 - 1), None, "Longest completion, for rows that do not say.",
           ("run",), "sampling", default_text="16 for completions, the room left in ctx for chat"),
    Option("temperature", Number(0, 2), 1.0,
           "Sampling temperature, for rows that do not say; 0 takes the most likely token.", ("run",), "sampling"),
    Option("top_p", Number(0, 1), 1.0,
           "Choose among the most likely tokens of this total probability, for rows that do not say.",
           ("run",), "sampling"),
    Option("top_k", Integer(0, 2**31 - 1, "K"), 0,
           "Choose among this many most likely tokens, for rows that do not say; 0 for all.", ("run",), "sampling"),
    Option("min_p", Number(0, 1), 0.0,
           "Leave out tokens less likely than this share of the most likely one, for rows that do not say.",
           ("run",), "sampling"),
    Option("stop", Stops(), (), "Text that ends a completion, or a JSON list of up to 4, for rows that do not say.",
           ("run",), "sampling", default_text="none"),
    # ---- commands ----
    Option("output", Text("OUT"), None, "File of results, one JSON object a line; an earlier run's is resumed.",
           ("run", "pack", "bench shape", "bench draw"), short="-o", default_text="none",
           required=("run", "bench draw"),
           spoken_only=("pack", "bench shape", "bench draw"),
           verb_help={"pack": ("File to write the packed model to; on the command line only.", "a file in the cache"),
                      "bench shape": ("Only write the GGUF file, measure nothing; on the command line only.", "none"),
                      "bench draw": ("SVG file to write; on the command line only.", "none")}),
    Option("errors", Text("FILE"), None, "File for rows that failed.",
           ("run",), default_text="OUT with .jsonl replaced by .errors.jsonl"),
    Option("retry_errors", Flag(), False, "Run the rows again that failed in an earlier run.", ("run",)),
    Option("in_order", Flag(), False, "Write results in input order instead of as they finish.", ("run",)),
    Option("strict", Flag(), False,
           "Stop at the first row that fails. Rows that failed before are run again, so the same command goes on "
           "only once the row is corrected.", ("run",)),
    Option("format", Choice(("auto", "jsonl", "text")), "auto",
           "What the input is; auto goes by its name, else by its first line: JSON lines when that starts with {, "
           "else plain text, one prompt a line.", ("run",)),
    Option("chat", Flag(), False,
           "Plain text only: each line is a user's message to a chat model, put into its chat template, instead of a "
           "text to be continued.", ("run",)),
    Option("system", Text(), None, "Plain text only: the system message before each line; implies --chat.",
           ("run",), default_text="none"),
    Option("chat_template", Text("FILE"), None, "Jinja template for chats, instead of the model's own.",
           ("run",), default_text="the model's"),
    Option("any_model", Flag(), False,
           "Accept whatever name rows give in 'model', such as those written for another service; all run on -m.",
           ("run",)),
    Option("keep_changed", Flag(), False,
           "Go on although rows of IN have changed since they were finished; their old outcomes are kept.", ("run",)),
    Option("show", Integer(0, 10**6), 0, "Show the first N rows of IN and what came of them at the end.", ("run",)),
    Option("stats", Text("FILE"), None, "Write the run's figures to this file as one JSON object.",
           ("run",), default_text="none"),
    Option("log_format", Choice(("text", "json")), "text",
           "What standard error gets: text, or json: one object a line for what happens, in run also progress.",
           ("run", "up")),
    Option("queue", Text("FILE"), None,
           "Keep jobs and their outcomes in this file: they survive crashes of everything (docs/queue.md).",
           ("up",), default_text="none, in memory"),
    Option("keep", Number(1, 1e10, "SECONDS"), None,
           "Forget outcomes that nobody has acknowledged after so long.", ("up",), default_text="never"),
    Option("listen", Text("tcp://HOST:PORT"), None,
           "Take clients from the network too, if --keys lists their keys.", ("up",), default_text="none"),
    Option("keys", Text("FOLDER"), None, "Folder of the keys for --listen.", ("up",), default_text="none"),
    Option("make_keys", Flag(), False, "Make keys for a coordinator and a first client in the new folder --keys.",
           ("up",), spoken_only=("up",)),
    Option("logits", Text("OUT.npy"), None,
           "Write the logits of all tokens to this file: float32 [tokens][vocabulary], for numpy.load.",
           ("perplexity",), default_text="none"),
    Option("json", Flag(), False, "Print one JSON object instead of a text for people.",
           ("doctor", *_BENCHES, "inspect", "cache", "cache ls", "perplexity", "top"),
           verb_help={"top": ("Print one JSON object per look instead of a table.", "no")}),
    Option("once", Flag(), False, "Print one table and leave; so it is without a terminal.", ("top",)),
    Option("interval", Number(0.1, 3600, "SECONDS"), 1.0, "Time between looks.", ("top",)),
    Option("svg", Text("FILE"), None, "Write the table to this file as a picture; implies --once.",
           ("top",), default_text="none"),
    Option("layout", Flag(), False, "Show how each tensor's shape maps from the file to panels.", ("inspect",)),
    Option("verify", Flag(), False, "Read the whole pack and compare all checksums.", ("pack",)),
    Option("everything", Flag(), False, "Remove all packs, and fetched models too.", ("cache prune",)),
    Option("unused_days", Integer(0, 36500, "DAYS"), None, "Also remove packs that nothing has read for this long.",
           ("cache prune",), default_text="none"),
    Option("dry_run", Flag(), False, "Only say what would be removed.", ("cache prune",)),
    Option("quick", Flag(), False, "Fewer sizes and shorter runs: a first look in under a minute.",
           ("bench", "bench shape")),
    Option("roofline", Flag(), False, "Only the machine's ceilings; needs no model.", ("bench",)),
    Option("rounds", Integer(1, 99), 3, "Runs of each measurement; medians are printed.",
           ("bench", *_RUNS, "bench peer", "bench shape")),
    Option("concurrency", Integer(1, 4096), 16,
           "Requests open at the peer's server at a time.", ("bench peer",)),
    Option("peer_program", Text("PROGRAM"), None,
           "The peer's own program: llama-server for llama.cpp, the Python that has it for openvino and vllm.",
           ("bench peer",), default_text="none"),
    Option("peer_model", Text("FILE"), None,
           "What the peer loads. llama.cpp: a second file beside MODEL, such as one in Q4_0; vllm: a Hugging Face "
           "folder.", ("bench peer",), default_text="MODEL"),
    Option("peer_settings", Choice(("both", "default", "strong")), "both",
           "openvino and vllm: as they come, with the best settings we know, or each in turn.", ("bench peer",)),
    Option("warm_prefix", Flag(), False,
           "openvino and vllm with strong settings: answer the first row alone, then the others, which find what they "
           "share with it computed.", ("bench peer",)),
    Option("weights", Choice(("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")), "q4_k",
           "Format of the random weights.", ("bench shape",)),
    Option("step_seconds", Number(0, 60, "SECONDS"), 0.05,
           "How long a make-believe step takes; 0: as long as telling of it takes.", ("bench coordinator",)),
    Option("config", Text("FILE"), None, "TOML file with options.",
           (*_MODEL, "bench shape", "bench coordinator", "bench estimate", "bench draw", "cache", "cache ls",
            "cache prune", "doctor", "top"),
           default_text="none", in_files=False),
)  # fmt: skip

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}

# Variables of the environment that are no options: they hold for a process before any option is read.
PROCESS_VARIABLES: dict[str, str] = {
    "COREMILL_ISA": "Instruction set to use: scalar, avx2, avx_vnni or avx512_vnni. Default: the best this CPU has.",
    "COREMILL_CPU_MASK": "CPU features to pretend away, separated by commas, to test older instruction sets.",
    "COREMILL_CACHE": "Folder of packed and fetched models. Default: coremill in $XDG_CACHE_HOME or ~/.cache.",
    "COREMILL_DEBUG": "1 shows the Python traceback of an error, not only its message.",
    "COREMILL_DEBUG_BOOKS": "1 checks the coordinator's books of sequences and blocks after every event; slow.",
}


def default_of(name: str) -> Any:
    return BY_NAME[name].default


def of_verb(verb: str) -> tuple[Option, ...]:
    """The options a verb has, in the table's order."""
    return tuple(option for option in OPTIONS if verb in option.verbs)


def of_group(group: str) -> tuple[Option, ...]:
    return tuple(option for option in OPTIONS if option.group == group)


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" when a known name is close, else nothing."""
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f"; did you mean '{close[0]}'?" if close else ""
