"""`coremill pack`: pack a model before its first use, into the cache or into a file."""

from __future__ import annotations

from pathlib import Path

import click

from coremill.config.settings import Settings
from coremill.tools.options import Verb, takes


@click.command(
    cls=Verb,
    examples=[
        ("coremill pack model.gguf", "pack into the cache, so that the first run starts at once"),
        ("coremill pack model.gguf -o model.pack", "pack into a file; it can be used as a model itself"),
        ("coremill pack model.gguf --verify", "read the pack and compare all checksums"),
    ],
)
@click.argument("model_name", metavar="[MODEL]", required=False)
@takes("pack")
def command(settings: Settings, model_name: str | None) -> None:
    """Pack MODEL (a GGUF file or a short name) and print where the pack is.

    What is packed already is not packed again.
    """
    from coremill.config.outputs import check_replaceable
    from coremill.native.cache import cache_folder, ensure_pack, find_model, pack_file
    from coremill.native.packfile import MAGIC, is_pack, open_pack
    from coremill.tools.model_progress import ModelProgress

    model = model_name or settings.require("model", "MODEL")
    with ModelProgress() as progress:
        if settings["output"] is None:
            pack = ensure_pack(model, progress=progress)
        else:
            pack = Path(settings["output"])
            source = find_model(model, cache_folder(), progress)
            if is_pack(source):
                raise click.UsageError(f"{source} is a pack already; copy it instead")
            check_replaceable("-o/--output", str(pack), MAGIC, "a pack")
            pack_file(source, pack, progress)
        with open_pack(pack) as opened:
            if settings["verify"]:
                progress("comparing checksums", 0, 0)
                opened.verify()
    if settings["verify"]:
        click.echo("coremill: all checksums are right", err=True)
    click.echo(pack)
