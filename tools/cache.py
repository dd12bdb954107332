"""`coremill cache`: what the cache holds, and making room in it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coremill.config.settings import Settings
from coremill.tools.options import Verb, VerbGroup, takes

if TYPE_CHECKING:
    from coremill.native.cache import CachedPack


@click.group(
    cls=VerbGroup,
    invoke_without_command=True,
    examples=[
        ("coremill cache ls", "packs and fetched models, with sizes and sources"),
        ("coremill cache prune --dry-run", "what could go"),
        ("coremill cache prune --unused-days 30", "remove packs without a source, and what was not used for a month"),
    ],
)
@takes("cache")
@click.pass_context
def command(context: click.Context, settings: Settings) -> None:
    """List and remove packed models; alone it lists them. COREMILL_CACHE sets the folder."""
    if context.invoked_subcommand is None:
        _list(settings["json"])
    elif lost := [settings.source(name) for name in settings if settings.source(name).startswith("--")]:
        raise click.UsageError(f"{lost[0]} goes behind the word '{context.invoked_subcommand}'", context)


@command.command("path", cls=Verb, examples=[('du -sh "$(coremill cache path)"', "how much the cache holds")])
def path() -> None:
    """Print the folder of the cache."""
    from coremill.native.cache import cache_folder

    click.echo(cache_folder())


@command.command("ls", cls=Verb, examples=[("coremill cache ls --json", "the same for a script")])
@takes("cache ls")
def ls(settings: Settings) -> None:
    """List packs and fetched models, least recently used first."""
    _list(settings["json"])


def _list(as_json: bool) -> None:
    from coremill.config.memory import format_size
    from coremill.native.cache import cache_folder

    root = cache_folder()
    entries = _entries(root)
    if as_json:
        click.echo(json.dumps({"folder": str(root), "entries": entries}, indent=2))
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d", time.localtime(entry["last_used"]))
        comes_from = f"from {', '.join(entry['sources'])}" if entry["sources"] else "source gone or changed"
        what = "fetched model" if entry["kind"] == "model" else f"{entry['name']}, {comes_from}"
        # The path has a line of its own: it is long, and it is there to be copied.
        click.echo(f"{format_size(entry['bytes']):>10}  used {used}  {what}\n{'':12}{entry['path']}")
    total = sum(entry["bytes"] for entry in entries)
    click.echo(f"{format_size(total):>10}  in {len(entries)} files of {root}")


@command.command(
    "prune",
    cls=Verb,
    examples=[
        ("coremill cache prune", "remove packs whose model file is gone or changed, damaged packs, leftovers"),
        ("coremill cache prune --everything", "remove all packs and fetched models"),
    ],
)
@takes("cache prune")
def prune(settings: Settings) -> None:
    """Remove packs whose source is gone or changed, damaged packs, and leftovers of killed runs.

    A pack that is removed while a run uses it stays usable for that run.
    """
    from coremill.config.memory import format_size
    from coremill.native.cache import cache_folder, fetched_models, list_packs, prune_cache

    root = cache_folder()
    packs = [pack for pack in list_packs(root) if _is_to_go(pack, settings)]
    models = fetched_models(root) if settings["everything"] else []
    verb = "would remove" if settings["dry_run"] else "removed"
    paths = [pack.path for pack in packs] + models
    freed = sum(path.stat().st_size for path in paths)
    if not settings["dry_run"]:
        freed = prune_cache(root, paths)
    for path in paths:
        click.echo(f"{verb} {path}")
    click.echo(f"{verb} {format_size(freed)}" if freed or paths else "nothing to remove")


def _is_to_go(pack: CachedPack, settings: Settings) -> bool:
    from coremill.native.packfile import pack_is_usable

    days = settings["unused_days"]
    unused = days is not None and time.time() - pack.last_used >= days * 86400
    return settings["everything"] or not pack.sources or unused or not pack_is_usable(pack.path, pack.key)


def _entries(root: Path) -> list[dict[str, Any]]:
    from coremill.native.cache import fetched_models, list_packs

    entries = [
        {
            "kind": "pack",
            "path": str(pack.path),
            "name": _name_of(pack.path),
            "bytes": pack.nbytes,
            "last_used": pack.last_used,
            "sources": list(pack.sources),
        }
        for pack in list_packs(root)
    ]
    for model in fetched_models(root):
        info = model.stat()
        used = max(info.st_atime, info.st_mtime)
        entry = {"kind": "model", "path": str(model), "name": model.name, "bytes": info.st_size, "last_used": used}
        entries.append(entry | {"sources": []})
    return sorted(entries, key=lambda entry: entry["last_used"])


def _name_of(path: Path) -> str:
    """A pack's model, or what is wrong with the pack."""
    from coremill.config.errors import PackError
    from coremill.config.printable import printable
    from coremill.native.packfile import open_pack

    try:
        with open_pack(path) as pack:
            pack.check_sections()
            return printable(pack.spec.name)
    except PackError as error:
        return f"unusable: {printable(str(error))}"
