"""Exit codes of the command line; 70, which all ranks end with, is `distributed.leaving`'s."""

EXIT_FAILED = 1
EXIT_UNUSABLE = 2
"""A pack, a setting, a request or a machine that cannot be used as was asked."""
EXIT_INTERRUPTED = 130
