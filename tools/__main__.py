"""`python -m coremill.tools`: as `python -m coremill`."""

from coremill.tools.cli import main

if __name__ == "__main__":
    main(prog_name="coremill")
