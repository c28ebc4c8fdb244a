"""The version, for packs, statistics and `--version`. Nothing is imported here."""

VERSION = "0.1.0.dev0"
