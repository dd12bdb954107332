"""The command line as a whole: start, help, errors and exit codes."""

import os
import subprocess
import sys
import types

import click
import pytest
from click.testing import CliRunner

from coremill.config import errors
from coremill.config.options import OPTIONS, of_verb
from coremill.tools import cli
from coremill.tools.options import Verb, document, takes

RUN = [sys.executable, "-m", "coremill.tools"]
# Makes every verb say something on stderr.
MISSPELT = {**os.environ, "COREMILL_NOBODY": "1"}


def coremill(*args: str, **environ: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COREMILL_")}
    return subprocess.run([*RUN, *args], capture_output=True, text=True, env=clean | environ)


@pytest.fixture
def verb(monkeypatch):
    """Replaces the verb `run` by one that does what the test says."""

    def install(function):
        command = click.command(cls=Verb, examples=[("coremill run IN", "an example")])(takes("run")(function))
        monkeypatch.setitem(sys.modules, "coremill.tools.run", types.SimpleNamespace(command=command))

    return install


def invoke(*args: str, **environ: str):
    return CliRunner().invoke(cli.main, args, env=environ)


def test_help_imports_no_verb_and_no_library():
    code = """
import sys
from coremill.tools.cli import main
try:
    main(["--help"])
except SystemExit as e:
    print(e.code)
print(*sorted(n for n in sys.modules if n.startswith("coremill.") or n in ("numpy", "rich", "zmq", "tokenizers")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, exit_code, modules = done.stdout.splitlines()
    assert exit_code == "0"
    assert modules.split() == ["coremill.tools", "coremill.tools.cli"]
    for verb in cli.VERBS:
        assert f"  {verb} " in done.stdout


def test_version():
    done = coremill("--version")
    assert (done.returncode, done.stdout) == (0, "coremill 0.1.0\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run"], "coremill: Missing argument 'IN' (coremill run --help)"),
        (["run", "in", "--wokers", "3"], "coremill: No such option"),
        (["run", "in", "-t", "3"], "Here it is --workers and --cores-per-worker (coremill run --help)"),
        (["run", "in", "more"], "(coremill run --help)"),
        (["cache", "prun"], "coremill: No such command 'prun'; did you mean 'prune'? (coremill cache --help)"),
        (["run", "in", "-m"], "requires an argument (coremill"),
    ],
)
def test_usage_errors_are_one_line_with_a_hint(args, said):
    done = coremill(*args)
    assert (done.returncode, done.stdout) == (cli.EXIT_USAGE, "")
    assert said in done.stderr and done.stderr.startswith("coremill: ") and done.stderr.count("\n") == 1


def test_alone_it_shows_its_help():
    done = coremill()
    assert done.returncode == cli.EXIT_USAGE and "Exit codes:" in done.stdout + done.stderr


def test_unknown_verb():
    done = coremill("dcotor")
    assert done.returncode == cli.EXIT_USAGE
    assert "No such command 'dcotor'; did you mean 'doctor'?" in done.stderr


def test_options_reach_the_verb(verb):
    def function(settings):
        click.echo(f"{settings['workers']} {settings['in_order']} {settings.source('workers')}")

    verb(function)
    assert invoke("run", "--workers", "3", "--no-in-order").output == "3 False --workers\n"
    assert invoke("run", COREMILL_WORKERS="4", COREMILL_IN_ORDER="1").output == "4 True COREMILL_WORKERS\n"


def test_typing_errors_in_the_environment_are_said(verb):
    verb(lambda settings: None)
    done = invoke("run", COREMILL_WROKERS="4")
    assert done.exit_code == 0
    assert done.stderr == "coremill: warning: unknown variable COREMILL_WROKERS; did you mean 'COREMILL_WORKERS'?\n"


def test_help_of_a_verb_has_examples_and_limits(verb):
    verb(lambda settings: None)
    text = invoke("run", "--help").output
    assert "# an example\n  coremill run IN\n" in text
    assert "--prefix-cache / --no-prefix-cache" in text
    assert "--max-active B" in text
    assert "[default: 16]" in text
    assert "COREMILL_X_Y in the environment" in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("ctx is 1"), cli.EXIT_USAGE),
        (errors.ResumeRefusedError("seed was 1"), cli.EXIT_RESUME_REFUSED),
        (errors.GGUFError("a.gguf", "magic", "is wrong", 0), cli.EXIT_ERROR),
        (errors.EngineError("two\nlines"), cli.EXIT_ERROR),
        (OSError(24, "Too many open files"), cli.EXIT_ERROR),
        (FileNotFoundError(2, "No such file or directory", "in.jsonl"), cli.EXIT_ERROR),
        (KeyboardInterrupt(), cli.EXIT_INTERRUPTED),
        (BrokenPipeError(), cli.EXIT_ERROR),
    ],
)
def test_errors_become_one_line_and_a_code(verb, error, code):
    def function(settings):
        raise error

    verb(function)
    done = invoke("run")
    assert done.exit_code == code
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == (0 if isinstance(error, BrokenPipeError) else 1)
    assert all(line.startswith("coremill: ") for line in lines)


def test_debug_shows_the_traceback(verb):
    def function(settings):
        raise errors.EngineError("lost")

    verb(function)
    assert isinstance(invoke("run", COREMILL_DEBUG="1").exception, errors.EngineError)
    assert isinstance(invoke("run", COREMILL_DEBUG="0").exception, SystemExit)


def test_faults_of_the_program_are_not_hidden(verb):
    verb(lambda settings: 1 / 0)
    assert isinstance(invoke("run").exception, ZeroDivisionError)


@pytest.mark.parametrize(("result", "code"), [(None, 0), (3, 3), ("text", 0)])
def test_result_of_a_verb_is_the_exit_code(verb, result, code):
    verb(lambda settings: result)
    assert invoke("run").exit_code == code


def test_wrong_option_is_a_usage_error(verb):
    verb(lambda settings: None)
    done = invoke("run", "--wokers", "3")
    assert done.exit_code == cli.EXIT_USAGE
    assert "--workers" in done.stderr


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("--threads", "--cores-per-worker"),
        ("-t", "--workers"),
        ("-np", "--max-active"),
        ("-c", "--ctx"),
        ("--temp", "--t"),
    ],
)
def test_options_of_other_programs_get_a_hint(verb, given, ours):
    verb(lambda settings: None)
    done = invoke("run", given, "3")
    assert done.exit_code == cli.EXIT_USAGE and "Here it is" in done.stderr and ours in done.stderr


def test_a_model_where_a_command_is_expected():
    done = invoke("bench", "smollm2")
    assert done.exit_code == cli.EXIT_USAGE and "-m smollm2" in done.stderr
    assert "did you mean 'prune'" in invoke("cache", "prun").stderr


def test_wrong_value_is_one_line():
    done = coremill("doctor", COREMILL_JSON="perhaps")
    assert done.returncode == cli.EXIT_USAGE
    assert done.stderr.startswith("coremill: COREMILL_JSON is 'perhaps': it must be true or false")
    assert done.stderr.count("\n") == 1


def test_closed_pipe_is_no_complaint():
    done = subprocess.run([*RUN, "--help"], stdout=closed_pipe(), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (cli.EXIT_ERROR, "")


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_full_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RUN, "cache", "path"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        cli.EXIT_ERROR,
        "coremill: standard output: No space left on device\n",
    )


def test_nobody_needs_to_read_stderr():
    """Closed, full or a pipe without a reader: what is asked for is done, and no error is made of it."""
    with open("/dev/full", "w") as full:
        for stderr in (full, closed_pipe()):
            done = subprocess.run([*RUN, "cache", "path"], stdout=subprocess.PIPE, stderr=stderr, env=MISSPELT)
            assert done.returncode == 0 and done.stdout
    shell = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *RUN, "cache", "path"]
    done = subprocess.run(shell, stdout=subprocess.PIPE, env=MISSPELT)
    assert done.returncode == 0 and done.stdout.count(b"\n") == 1


def test_closed_streams_are_not_files_of_the_run(tmp_path):
    """The numbers of standard streams never go to another file."""
    code = (
        "import os, sys; from coremill.tools.streams import make_steady; make_steady()\n"
        "print(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), *map(os.get_inheritable, range(3)), file=sys.stderr)\n"
        "print('x', flush=True)"
    )
    shell = ["/bin/sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    number, *inherited = done.stderr.split()
    assert int(number) > 2 and inherited == ["True"] * 3


def test_the_limit_on_open_files():
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))\n"
        "from coremill.tools import cli; from coremill.tools.start import start\n"
        "cli.main = lambda **extra: print(resource.getrlimit(resource.RLIMIT_NOFILE)); start()"
    )
    for given, raised in ((("70", "100"), "(100, 100)\n"), (("100", "100"), "(100, 100)\n"), (("16", "16"), "")):
        done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
        assert done.stdout == raised
    assert done.returncode == cli.EXIT_ERROR and done.stderr.startswith("coremill: the limit on open files is 16")


def test_sigterm_ends_as_a_closed_process_does():
    code = (
        "import os, signal, sys, tempfile; from coremill.tools import cli; from coremill.tools.start import start\n"
        "def main(**extra):\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        print(folder, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "cli.main = main; start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (cli.EXIT_TERMINATED, "")
    assert done.stdout.strip() and not os.path.exists(done.stdout.strip())


def test_ctrl_c_while_importing_is_no_traceback():
    code = (
        "import sys; from coremill.tools.start import start\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop()); start()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (cli.EXIT_INTERRUPTED, "")


def test_documentation_is_that_of_the_table(repo_root):
    assert (repo_root / "docs/options.md").read_text() == document()


def all_commands(command=cli.main, path=()):
    """(words, command) of every verb, and of the verbs of verbs."""
    if path:
        yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from all_commands(command.get_command(context, name), (*path, name))


def test_every_verb_has_help_with_examples_and_options_of_the_table():
    commands = dict(all_commands())
    assert set(commands) >= set(cli.VERBS)
    assert {verb for option in OPTIONS for verb in option.verbs} <= set(commands)
    for path, command in commands.items():
        done = CliRunner().invoke(cli.main, [*path.split(), "--help"])
        assert done.exit_code == 0, path
        assert command.get_short_help_str(), path
        assert "\nExamples:\n" in done.stdout, path
        assert f"coremill {path}" in done.stdout.split("\nExamples:\n")[1], path
        names = {parameter.name for parameter in command.params if isinstance(parameter, click.Option)}
        assert names == {option.name for option in of_verb(path)}, path
