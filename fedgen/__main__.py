"""``python -m fedgen``: the command line, where scripts are not on the PATH."""

from fedgen.cli import main

if __name__ == "__main__":
    main()
