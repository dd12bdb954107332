"""The `coremill` command."""

import click


@click.group()
@click.version_option(package_name="coremill")
def main() -> None:
    """Run language models over files of prompts on every core of this machine."""
