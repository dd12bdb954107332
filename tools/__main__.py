"""`python -m coremill.tools`: as `python -m coremill`."""

from coremill.tools.start import start

if __name__ == "__main__":
    start()
