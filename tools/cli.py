"""The `coremill` command: a table of verbs whose modules are imported only when they are used.

Exit codes: EXIT_CODES below. Errors that coremill raises on purpose are one line on stderr; COREMILL_DEBUG=1
adds the traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import click

# Verb -> (module with the click command `command`, help in the list of verbs).
VERBS: dict[str, tuple[str, str]] = {
    "run": ("coremill.tools.run", "Run a file of prompts through a model."),
    "up": ("coremill.tools.up", "Keep a model ready for programs that come and go."),
    "top": ("coremill.tools.top.command", "Watch the workers of what is running."),
    "inspect": ("coremill.tools.inspect", "Show what a model file holds and how it is packed."),
    "pack": ("coremill.tools.pack", "Pack a model before its first use."),
    "cache": ("coremill.tools.cache", "List and remove packed models."),
    "bench": ("coremill.tools.bench.command", "Measure this machine and a model on it."),
    "perplexity": ("coremill.tools.perplexity", "Measure how well a model predicts a text."),
    "doctor": ("coremill.tools.doctor", "Show what coremill finds on this machine."),
}

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_ROWS_FAILED, EXIT_RESUME_REFUSED, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_ROWS_CHANGED, EXIT_STRICT, EXIT_TERMINATED = 5, 6, 143
EXIT_CODES: dict[int, str] = {
    EXIT_OK: "all went well",
    EXIT_ERROR: "an error, said in one line on stderr",
    EXIT_USAGE: "a wrong command line, variable or configuration file",
    EXIT_ROWS_FAILED: "run: finished, but some rows failed (see the error file)",
    EXIT_RESUME_REFUSED: "run, up: the output or the queue belongs to other settings, or to other rows",
    EXIT_ROWS_CHANGED: "run: finished, but some rows of the input have changed since they ran (--keep-changed)",
    EXIT_STRICT: "run: stopped at the first failed row, as --strict asks",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
    EXIT_TERMINATED: "stopped by SIGTERM",
}


# Options of llama.cpp's and vLLM's programs, which fingers remember.
_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("-t", "--threads"), "--workers and --cores-per-worker"),
    **dict.fromkeys(("-n", "--predict", "--n-predict"), "--max-tokens (and --max-active for -np)"),
    **dict.fromkeys(("-c", "--ctx-size", "--max-model-len"), "--ctx"),
    **dict.fromkeys(("--parallel", "--max-num-seqs"), "--max-active"),
    **dict.fromkeys(("-b", "--batch-size", "--ubatch-size"), "--step-tokens"),
    "--temp": "--temperature",
}


class _LazyGroup(click.Group):
    """Verbs from the table; errors become exit codes here, for every verb alike."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return importlib.import_module(VERBS[cmd_name][0]).command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            from coremill.config.options import nearest

            ctx.fail(f"No such command '{args[0]}'{nearest(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        sys.exit(_exit_code_of(lambda: super(_LazyGroup, self).main(*args, standalone_mode=False, **extra)))


def _exit_code_of(call: Callable[[], Any]) -> int:
    """Runs a command. What it returns is its exit code, if that is an int; None is success."""
    try:
        result = call()
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_OK
    except click.ClickException as error:
        return _report_usage(error)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("coremill: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left (`coremill ... | head`): click exits alike
        return EXIT_ERROR
    except Exception as error:
        if os.environ.get("COREMILL_DEBUG", "0") not in ("", "0"):
            raise
        return _report(error)


def _report_usage(error: click.ClickException) -> int:
    """Click's own errors in one line, like all others; its exit code."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # the help, whole
        error.show()
        return error.exit_code
    if isinstance(error, click.NoSuchOption) and error.option_name in _ELSEWHERE:
        error.possibilities = None
        error.message += f" Here it is {_ELSEWHERE[error.option_name]}."
    context = getattr(error, "ctx", None)
    path = "coremill" if context is None else context.command_path
    click.echo(f"coremill: {' '.join(error.format_message().split()).rstrip('.')} ({path} --help)", err=True)
    return error.exit_code


def _report(error: Exception) -> int:
    """Says an error; its exit code. An error that is a fault of the program is raised."""
    message, code = describe(error)
    click.echo(f"coremill: {message}", err=True)
    return code


def describe(error: Exception) -> tuple[str, int]:
    """(one line for people, exit code) of an error that is no fault of the program; any other is raised."""
    from coremill.config.errors import ConfigError, CoremillError, ResumeRefusedError

    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{os.strerror(error.errno)}: raise the limit (`ulimit -n`)", EXIT_ERROR
    # A file of the user's that cannot be opened is no fault of the program; anything else unexpected is one.
    if isinstance(error, OSError) and error.filename is not None and error.errno is not None:
        return f"{error.filename}: {os.strerror(error.errno)}", EXIT_ERROR
    if not isinstance(error, CoremillError):
        raise error
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ConfigError):
        return message, EXIT_USAGE
    return message, EXIT_RESUME_REFUSED if isinstance(error, ResumeRefusedError) else EXIT_ERROR


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="coremill", message="%(prog)s %(version)s")
def main() -> None:
    """Run language models over files of prompts on every core of this machine.

    \b
      coremill run prompts.jsonl -m smollm2 -o results.jsonl

    `coremill VERB --help` shows a verb's options and examples.
    """
