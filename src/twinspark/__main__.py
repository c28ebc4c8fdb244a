"""`twinspark` and `python -m twinspark`: the command, which takes a third of a second to import."""

import sys

from twinspark.cli.exits import EXIT_INTERRUPTED
from twinspark.cli.hangups import heed_hangups
from twinspark.cli.interrupts import end_by_interrupts


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        if sys.argv[1:2] in (["serve"], ["demo"]):
            end_by_interrupts()
        if sys.argv[1:2] == ["serve"]:
            heed_hangups()
        from twinspark.cli.main import main as command

        command()
    except KeyboardInterrupt:  # while it is imported; `command` has its own end
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
