"""The table of options and the order of precedence."""

import dataclasses
import os
from pathlib import Path

import pytest

from coremill.config import options, settings
from coremill.config.engine import EngineConfig
from coremill.config.errors import ConfigError
from coremill.config.request import SamplingParams
from coremill.config.settings import from_command_line, from_keywords, unknown_variables


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A current folder without a coremill.toml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(given=None, **environ):
    return from_command_line("run", given or {}, environ)


# ---- the table ----


def test_engine_rows_are_the_fields_of_engine_config():
    assert [option.name for option in options.of_group("engine")] == [f.name for f in dataclasses.fields(EngineConfig)]
    assert EngineConfig() == EngineConfig(**{option.name: option.default for option in options.of_group("engine")})


def test_sampling_rows_have_the_defaults_of_sampling_params():
    assert SamplingParams() == SamplingParams(**{o.name: o.default for o in options.of_group("sampling")})


def test_rows_are_consistent():
    names = [name for option in options.OPTIONS for name in option.names]
    assert len(set(names)) == len(names)
    shorts = [(verb, option.short) for option in options.OPTIONS if option.short for verb in option.verbs]
    assert len(set(shorts)) == len(shorts)
    assert not {option.variable for option in options.OPTIONS} & set(options.PROCESS_VARIABLES)
    for option in options.OPTIONS:
        if option.default is not None:
            assert option.check(option.default, "default") == option.default
        else:
            assert option.default_text, option.name


def test_verbs_that_take_an_option_otherwise_say_so():
    ctx = options.BY_NAME["ctx"]
    assert "chunk" in ctx.help_for("perplexity") and "chunk" not in ctx.help_for("run")
    assert (ctx.default_for("perplexity"), ctx.default_for("run")) == ("512", ctx.default_text)
    for option in options.OPTIONS:
        assert {*option.verb_help, *option.required} <= set(option.verbs)


# ---- precedence ----


def test_each_source_beats_the_next(elsewhere):
    environ = {"HOME": str(elsewhere / "home"), "COREMILL_WORKERS": "5"}
    user = elsewhere / "home/.config/coremill/config.toml"
    user.parent.mkdir(parents=True)
    user.write_text("workers = 2")
    found = lambda given=None: from_command_line("run", given or {}, environ)  # noqa: E731
    named = elsewhere / "named.toml"
    named.write_text("workers = 4")

    assert (found({"workers": "6"})["workers"], found({"workers": "6"}).source("workers")) == (6, "--workers")
    assert (found()["workers"], found().source("workers")) == (5, "COREMILL_WORKERS")
    del environ["COREMILL_WORKERS"]
    assert found({"config": str(named)})["workers"] == 4
    assert found()["workers"] == 2
    (elsewhere / "coremill.toml").write_text("workers = 3")
    assert (found()["workers"], found().source("workers")) == (3, "coremill.toml: workers")
    assert found({"config": str(named)})["workers"] == 4
    (elsewhere / "coremill.toml").unlink()
    user.unlink()
    assert (found()["workers"], found().source("workers")) == (None, "default")
    assert not found().given("workers")


def test_sources_mix_by_option(elsewhere):
    (elsewhere / "coremill.toml").write_text('ctx = 512\nmax_active = 4\narena = "1.5G"\ntemperature = 0\n')
    found = run({"max_active": "8"}, COREMILL_SEED="-3", COREMILL_CTX="")
    assert (found["ctx"], found["max_active"], found["seed"], found["arena"]) == (512, 8, -3, 3 << 29)
    assert EngineConfig.from_settings(found) == EngineConfig(ctx=512, max_active=8, seed=-3, arena=3 << 29)
    assert SamplingParams(**found.of_group("sampling")) == SamplingParams(temperature=0.0)


def test_an_option_for_the_command_line_only(elsewhere):
    (elsewhere / "coremill.toml").write_text('output = "out.jsonl"')
    environ = {"COREMILL_OUTPUT": "other.jsonl"}
    assert (run()["output"], run(**environ)["output"]) == ("out.jsonl", "other.jsonl")
    pack = lambda given: from_command_line("pack", given, environ)  # noqa: E731
    assert pack({})["output"] is None and not pack({}).given("output")
    assert pack({"output": "x.pack"})["output"] == "x.pack"


def test_named_file_from_the_environment(elsewhere):
    (elsewhere / "a.toml").write_text("workers = 7")
    assert run(COREMILL_CONFIG="a.toml")["workers"] == 7


def test_xdg_folder_must_be_absolute(elsewhere):
    path = elsewhere / "xdg/coremill/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("workers = 9")
    assert run(XDG_CONFIG_HOME=str(elsewhere / "xdg"))["workers"] == 9
    assert run(XDG_CONFIG_HOME="xdg")["workers"] is None


@pytest.mark.parametrize(
    ("given", "environ", "value"),
    [
        ({}, {}, True),
        ({"prefix_cache": False}, {}, False),
        ({}, {"COREMILL_PREFIX_CACHE": "off"}, False),
        ({}, {"COREMILL_NO_PREFIX_CACHE": "1"}, False),
        ({}, {"COREMILL_NO_PREFIX_CACHE": "false"}, True),
        ({"prefix_cache": True}, {"COREMILL_NO_PREFIX_CACHE": "1"}, True),
    ],
)
def test_flags_and_their_opposites(given, environ, value):
    assert run(given, **environ)["prefix_cache"] is value


def test_opposites_in_a_file(elsewhere):
    (elsewhere / "coremill.toml").write_text("no_prefix_cache = true")
    assert run()["prefix_cache"] is False
    (elsewhere / "coremill.toml").write_text("no_prefix_cache = true\nprefix_cache = false")
    with pytest.raises(ConfigError, match="no_prefix_cache and prefix_cache are both given"):
        run()
    with pytest.raises(ConfigError, match="COREMILL_NO_STRICT and COREMILL_STRICT are both set"):
        run(COREMILL_STRICT="1", COREMILL_NO_STRICT="1")


# ---- errors name option, source, value and limit ----


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"max_active": "0"}, {}, "--max-active is '0': it must be an integer from 1 to 1024"),
        ({"max_active": "many"}, {}, "--max-active is 'many': it must be an integer"),
        ({"max_active": "1_0"}, {}, "--max-active is '1_0'"),
        ({}, {"COREMILL_WORKERS": "x"}, "COREMILL_WORKERS is 'x': it must be an integer from 1 to 4096"),
        ({"temperature": "nan"}, {}, "--temperature is 'nan': it must be a number from 0 to 2"),
        ({"temperature": "\u0661"}, {}, "--temperature is '\u0661': it must be a number from 0 to 2"),
        ({"top_p": "0_1"}, {}, "--top-p is '0_1': it must be a number from 0 to 1"),
        ({"arena": "8X"}, {}, "--arena is '8X': it must be a size of 1 byte to 1024 TiB, such as 512M"),
        ({"kv": "q3"}, {}, "--kv is 'q3': it must be one of f16, q8"),
        ({"output": ""}, {}, "--output is '': it must be a text that is not empty"),
        ({}, {"COREMILL_STRICT": "maybe"}, "COREMILL_STRICT is 'maybe': it must be true or false"),
        ({"arena": "9" * 5000}, {}, "it must be a size of 1 byte to 1024 TiB"),
        ({"arena": "9" * 308 + "T"}, {}, "it must be a size of 1 byte to 1024 TiB"),
        ({"temperature": "9" * 5000}, {}, "it must be a number from 0 to 2"),
        ({"seed": "9" * 400}, {}, "it must be an integer from -9223372036854775808"),
    ],
)
def test_wrong_values(given, environ, message):
    with pytest.raises(ConfigError) as caught:
        run(given, **environ)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_activ = 3", "coremill.toml: unknown key 'max_activ'; did you mean 'max_active'?"),
        ("zzz = 3", "coremill.toml: unknown key 'zzz'"),
        ("[run]\nworkers = 1", "coremill.toml: unknown table 'run'"),
        ("config = 'x'", "coremill.toml: unknown key 'config'"),
        ("workers = '3'", "coremill.toml: workers is '3': it must be an integer from 1 to 4096"),
        ("workers = true", "coremill.toml: workers is True"),
        ("strict = 1", "coremill.toml: strict is 1: it must be true or false"),
        # An option of another verb is checked, too.
        ("concurrency = 0", "coremill.toml: concurrency is 0"),
        ("arena = '" + "9" * 5000 + "'", "it must be a size of 1 byte to 1024 TiB"),
        ("arena = " + "9" * 5000, "configuration file coremill.toml: it has a number of more than"),
        ("workers = ", "configuration file coremill.toml: Invalid value"),
    ],
)
def test_wrong_files(elsewhere, text, message):
    (elsewhere / "coremill.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        run()
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["input", "threads", "batch", "url"])
def test_what_is_like_nothing_gets_no_suggestion(elsewhere, name):
    (elsewhere / "coremill.toml").write_text(f"{name} = 3")
    with pytest.raises(ConfigError, match=f"unknown key '{name}'$"):
        run()


def test_files_that_cannot_be_read(elsewhere):
    with pytest.raises(ConfigError, match=r"configuration file no\.toml: No such file"):
        run({"config": "no.toml"})
    (elsewhere / "coremill.toml").write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 9"):
        run()
    (elsewhere / "coremill.toml").write_bytes(b"\xef\xbb\xbfworkers = 2\r\n")
    assert run()["workers"] == 2
    (elsewhere / "coremill.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        run()


def test_what_has_the_name_of_a_file_but_is_none(elsewhere):
    path = elsewhere / "coremill.toml"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"coremill\.toml: it is not a regular file"):
        run()
    path.rmdir()
    path.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"coremill\.toml: No such file"):
        run()
    path.unlink()
    os.mkfifo(elsewhere / "fifo")
    with pytest.raises(ConfigError, match="fifo: it is not a regular file"):
        run({"config": "fifo"})


def test_missing_required_option():
    with pytest.raises(ConfigError, match=r"missing option -m/--model \(or COREMILL_MODEL in the environment, or mod"):
        run().require("model")


def test_typing_errors_in_the_environment():
    environ = {
        "COREMILL_WORKER": "2",
        "COREMILL_NO_STRICT": "1",
        "COREMILL_ISA": "avx2",
        "COREMILL_TEST_X": "",
        "X": "",
    }
    assert unknown_variables(environ) == ["COREMILL_WORKER; did you mean 'COREMILL_WORKERS'?"]


# ---- Python ----


def keywords(given, **environ):
    return from_keywords(options.of_group("engine"), given, environ)


def test_keywords():
    assert keywords({"workers": 2, "arena": "1G", "ctx": None}, COREMILL_WORKERS="4", COREMILL_CTX="99")["ctx"] == 99
    found = keywords({"workers": 2, "arena": "1G"}, COREMILL_WORKERS="4")
    assert (found["workers"], found["arena"], found.source("workers")) == (2, 1 << 30, "keyword workers")


def test_keywords_and_files(elsewhere):
    (elsewhere / "coremill.toml").write_text("workers = 3")
    assert keywords({})["workers"] is None
    assert keywords({"config": elsewhere / "coremill.toml"})["workers"] == 3


def test_wrong_keywords():
    with pytest.raises(ConfigError, match="unknown option 'worker'; did you mean 'workers'"):
        keywords({"worker": 2})
    with pytest.raises(ConfigError, match="workers is '2': it must be an integer from 1 to 4096"):
        keywords({"workers": "2"})
    for arena in ("9" * 5000, 10**5000, [10**5000], 1e400):
        with pytest.raises(ConfigError, match=r"^arena is .*: it must be a size of 1 byte to 1024 TiB"):
            keywords({"arena": arena})
    with pytest.raises(ConfigError, match="arena is a number of more than 4300 digits"):
        EngineConfig(arena=10**5000)


def test_engine_config_checks_itself(monkeypatch):
    for name in list(settings.os.environ):
        if name.startswith("COREMILL_"):
            monkeypatch.delenv(name)
    assert EngineConfig.from_keywords(workers=2).workers == 2
    with pytest.raises(ConfigError, match="max_active is None"):
        EngineConfig(max_active=None)
    with pytest.raises(ConfigError, match="ctx is 1: it must be an integer from 2"):
        EngineConfig(ctx=1)


def test_longest_request():
    assert [EngineConfig().longest_request(length) for length in (2048, 8192)] == [2048, 4096]
    assert EngineConfig(ctx=8000).longest_request(8192) == 8000
    with pytest.raises(ConfigError, match="ctx is 8000: the model's context length is 4096"):
        EngineConfig(ctx=8000).longest_request(4096)
