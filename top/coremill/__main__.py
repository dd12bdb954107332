"""`python -m coremill`: the `coremill` command where no script is installed."""

from coremill.tools.cli import main

if __name__ == "__main__":
    main(prog_name="coremill")
