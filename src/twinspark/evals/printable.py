"""Text of servers and models as a line that a terminal can be given."""


def printable(text: str) -> str:
    """A text with what is no visible character (controls, breaks) escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
