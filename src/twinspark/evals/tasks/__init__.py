"""One task a file: `cases` from a seed, each with its right ending and its judge."""
