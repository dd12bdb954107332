"""`python -m coremill`: the `coremill` command where no script is installed."""

from coremill.tools.start import start

if __name__ == "__main__":
    start()
