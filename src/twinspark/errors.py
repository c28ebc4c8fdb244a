"""Every error the package raises on purpose. Nothing is imported here.

TwinSparkError
|-- ConfigError            a setting or a config.json that cannot be used
|-- PackError              something is wrong with a pack on disk
|   |-- FormatError        a file, header, tensor shape or dtype is not what the format says
|   |-- ChecksumError      the bytes differ from the pack's own manifest
|   `-- MissingTensor      the config asks for a tensor the pack does not have
|-- KernelUnsupported      the named backend cannot run these inputs
|-- CapacityError          no room now; the same request may fit later
|-- RequestError           the request is wrong; it will never work as it is
|-- RankFailed             a rank died, stalled or fell out of step; all end together
`-- EngineDied             the engine process is gone

Messages say what was expected, what came, and what to do.
"""


class TwinSparkError(Exception):
    """Base of all errors raised on purpose; the command line prints these without a traceback."""


class ConfigError(TwinSparkError):
    """A setting, or a config.json, that cannot be used."""


class PackError(TwinSparkError):
    """Something is wrong with a pack on disk."""


class FormatError(PackError):
    """A file, header, tensor shape or dtype is not what the format says."""


class ChecksumError(PackError):
    """The bytes of a file differ from the pack's own manifest."""


class MissingTensor(PackError):
    """The config asks for a tensor that the pack does not have."""


class KernelUnsupported(TwinSparkError):
    """The named backend cannot run these inputs; the text says why."""


class CapacityError(TwinSparkError):
    """There is no room now; the same request may fit later.

    Attributes:
        code: "queue_full", "queue_too_long" or "memory".
        retry_after_s: when it may be worth trying again, if that can be told.
    """

    def __init__(
        self, message: str, *, code: str = "queue_full", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class RequestError(TwinSparkError):
    """The request is wrong as it stands.

    Attributes:
        param: the field at fault, as the client wrote it, or None.
        code: a machine-readable word such as "context_length_exceeded", or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineDied(TwinSparkError):
    """The engine process ended while somebody still waited for it."""


class RankFailed(TwinSparkError):
    """A rank died, stalled or fell out of step with the others; all of them end."""
