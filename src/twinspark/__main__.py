"""`python -m twinspark` is the `twinspark` command."""

from twinspark.cli.main import main

if __name__ == "__main__":
    main()
