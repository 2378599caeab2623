"""`python -m warmfront` is the command `warmfront`."""

from warmfront.cli import main

if __name__ == "__main__":
    main(prog_name="warmfront")
