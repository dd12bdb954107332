"""The table of options (config/options.py) as click sees it.

    @click.command(cls=Verb, examples=[("coremill doctor", "look at this machine")])
    @takes("doctor")
    def command(settings): ...

`python -m coremill.tools.options` prints docs/options.md.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from coremill.config.options import ENV_PREFIX, OPTIONS, PROCESS_VARIABLES, Option, nearest, of_verb
from coremill.config.settings import from_command_line, unknown_variables

_SOURCES_HINT = f"Every option --x-y is also {ENV_PREFIX}X_Y in the environment and x_y in coremill.toml."


class _ExamplesMixin:
    """Adds the examples to the end of a command's help."""

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples:
                    formatter.write_text(f"# {meaning}")
                    # Not wrapped: people copy these lines.
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
        if any(isinstance(parameter, click.Option) for parameter in self.params):
            formatter.write_paragraph()
            formatter.write_text(_SOURCES_HINT)


class Verb(_ExamplesMixin, click.Command):
    """A verb of the command line, with examples in its help."""


class VerbGroup(_ExamplesMixin, click.Group):
    """A verb that has verbs of its own."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            takes_model = any(parameter.name == "model" for parameter in self.params)
            hint = f"; for a model write -m {args[0]}" if takes_model else nearest(args[0], self.commands)
            ctx.fail(f"No such command '{args[0]}'{hint}")
        return super().resolve_command(ctx, args)


def takes(verb: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command every option of `verb`; the function gets them as keyword `settings` (Settings), resolved."""
    options = of_verb(verb)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def resolved(**given: Any) -> Any:
            subcommand = click.get_current_context().invoked_subcommand
            strangers = unknown_variables(os.environ) if subcommand is None else []
            mine = {option.name: given.pop(option.name) for option in options}
            as_json = False
            try:
                settings = from_command_line(verb, mine)
                as_json = settings.get("log_format") == "json"
            finally:
                for line in strangers:
                    _warn(f"warning: unknown variable {line}", as_json)
            return function(settings=settings, **given)

        for option in reversed(options):
            resolved = _click_option(option, verb)(resolved)
        return resolved

    return decorate


def _warn(text: str, as_json: bool) -> None:
    line = json.dumps({"time": round(time.time(), 3), "event": "message", "text": text})
    click.echo(line if as_json else f"coremill: {text}", err=True)


def _click_option(option: Option, verb: str) -> Callable[[Any], Any]:
    """Texts pass through click unread and absent options stay None: limits and defaults are the table's."""
    names = [option.short] if option.short else []
    note = "required" if verb in option.required else f"default: {option.default_for(verb)}"
    help_text = f"{option.help_for(verb)}  [{note}]"
    if option.is_flag:
        switch = f"{option.switch}/{option.switch.replace('--', '--no-', 1)}"
        return click.option(*names, switch, option.name, default=None, help=help_text)
    return click.option(*names, option.switch, option.name, default=None, metavar=option.kind.metavar, help=help_text)


# ---- docs/options.md ----

_PRECEDENCE = (
    ("command line", "`--max-active 8`", "In Python: keywords, `Coordinator(model, max_active=8)`."),
    ("environment", "`COREMILL_MAX_ACTIVE=8`", "An empty variable counts as absent."),
    ("`--config FILE`", "`max_active = 8`", "The only file that Python reads: `Coordinator(model, config=FILE)`."),
    ("`coremill.toml`", "`max_active = 8`", "In the current folder."),
    ("user's file", "`max_active = 8`", "`$XDG_CONFIG_HOME/coremill/config.toml`, by default below `~/.config`."),
    ("default", "", "The tables below."),
)

_HEAD = """# Options

Written by `python -m coremill.tools.options > docs/options.md` from the table in config/options.py; a test compares.

Every option `--x-y` is also `COREMILL_X_Y` in the environment and `x_y` in a TOML file. A flag `--x-y` has an
opposite `--no-x-y`, also as `COREMILL_NO_X_Y=1` and `no_x_y = true`. For each option the first of these sources that
names it wins:

"""

_RULES = """
A value outside its limits is an error that names the option, where the value came from, the value and the limit.
TOML files are flat, without tables. An unknown key in one is an error that names the nearest known key; an unknown
`COREMILL_` variable is a warning. Values in a file are checked even when the verb at hand does not use them.
File names are relative to the current folder, whichever source they come from. Sizes are in bytes and may have a unit
in powers of 1024: `512M`, `1.5GiB`.
"""

_GROUPS = (
    ("engine", "The engine", "Also keywords of `Coordinator`."),
    ("sampling", "Sampling, for rows that do not say", "A row's own fields always win."),
    ("command", "Commands", ""),
)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def document() -> str:
    """docs/options.md."""
    sources = [(str(number), *row) for number, row in enumerate(_PRECEDENCE, 1)]
    text = _HEAD + _table(("", "source", "example", ""), sources) + _RULES
    for group, title, note in _GROUPS:
        rows = [_document_row(option) for option in OPTIONS if option.group == group]
        text += f"\n## {title}\n\n" + (f"{note}\n\n" if note else "")
        text += _table(("option", "value", "default", "verbs", "meaning"), rows)
    text += "\n## Variables of the process\n\nThese are no options; they hold before any option is read.\n\n"
    return text + _table(("variable", "meaning"), [(f"`{name}`", what) for name, what in PROCESS_VARIABLES.items()])


def _document_row(option: Option) -> tuple[str, ...]:
    short = f"`{option.short}`, " if option.short else ""
    limit = "" if option.kind.metavar in ("MODEL", "OUT", "FILE") or option.is_flag else option.kind.limit
    value = "flag" if option.is_flag else option.kind.metavar
    return (
        f"{short}`{option.switch}`",
        f"{value}: {limit}" if limit else value,
        "; ".join(_defaults(option)),
        ", ".join(option.verbs),
        " ".join([option.help, *(f"{verb}: {help}" for verb, (help, _) in option.verb_help.items())]),
    )


def _defaults(option: Option) -> list[str]:
    """In words: of most verbs, then of each that has another one."""
    usual = f"required by {', '.join(option.required)}" if option.required else option.shown_default
    others = {verb: default for verb, (_, default) in option.verb_help.items() if verb not in option.required}
    return [usual, *(f"{verb}: {default}" for verb, default in others.items() if default != usual)]


if __name__ == "__main__":
    click.echo(document(), nl=False)
