"""`twinspark` and `python -m twinspark`: the command, which takes a third of a second to import."""

import sys

from twinspark.cli.hangups import heed_hangups

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        if sys.argv[1:2] == ["serve"]:
            heed_hangups()
        from twinspark.cli.main import main as command

        command()
    except KeyboardInterrupt:  # while it is imported; `command` has its own end
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
