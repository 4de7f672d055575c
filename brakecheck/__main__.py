"""python -m brakecheck: the command line where the script is not on PATH."""

from .cli import main

if __name__ == "__main__":
    main()
