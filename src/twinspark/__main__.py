"""`twinspark` and `python -m twinspark`: the command, which takes a third of a second to import."""

import sys

from twinspark.cli.hangups import heed_hangups


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.argv[1:2] == ["serve"]:
        heed_hangups()
    from twinspark.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
