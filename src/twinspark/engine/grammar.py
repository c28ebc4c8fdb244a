"""Forms of replies compiled to constraints, away from the rounds, and kept for the next request.

One thread compiles; the library lets the interpreter go meanwhile. A form that is known is ready at
once. Read next: `constraints.py` (what uses them), `text/grammar.py` (who writes them).
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinspark.engine.closing import Closer
from twinspark.engine.constraints import Bools, Constraint
from twinspark.errors import RequestError, TwinSparkError
from twinspark.messages import Form, GenerateRequest
from twinspark.text.grammar_library import fault_of, library_matcher, library_tokenizer
from twinspark.text.tokenizer import DSML, Tokenizer

MAX_CACHED_FORMS = 64
MAX_CACHED_BYTES = 1 << 20  # of grammar text; compiled ones take up to fifty times as much
_WORD_BITS = 32


class MaskBuffer:
    """Where the library writes a mask before it becomes one bool an id; for one thread.

    Attributes:
        vocab_size: ids of the model.
        address: of the first word.
        num_bytes: of all words.
    """

    def __init__(self, vocab_size: int, library_size: int) -> None:
        """Allocate it; the library may know more ids than the model has."""
        self.vocab_size = vocab_size
        self._words = np.zeros(-(-library_size // _WORD_BITS), np.uint32)
        self._bytes = self._words.view(np.uint8)
        self.address = self._words.ctypes.data
        self.num_bytes = self._words.nbytes

    def bools(self) -> Bools:
        """What it holds, bool [V]."""
        bits = np.unpackbits(self._bytes, count=self.vocab_size, bitorder="little")
        return bits.view(np.bool_)


class GrammarConstraint:
    """Implements `constraints.Constraint` with a matcher of the grammar library."""

    def __init__(self, matcher: Any, buffer: MaskBuffer) -> None:
        """Follow a grammar.

        Args:
            matcher: used by nobody else from now on.
            buffer: may be shared by constraints of one thread.
        """
        self._matcher = matcher
        self._buffer = buffer

    @property
    def is_finished(self) -> bool:
        """The form is complete and nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def mask(self) -> Bools:
        """What may come next, bool [V].

        Raises:
            TwinSparkError: the grammar is too costly here, which ends this reply only.
        """
        self._matcher.unsafe_compute_mask_ptr(self._buffer.address, self._buffer.num_bytes)
        if self._matcher.is_error():
            raise TwinSparkError(
                f"the form of the reply cannot be followed any further: {fault_of(self._matcher)}"
            )
        return self._buffer.bools()

    def advance(self, token: int) -> None:
        """Take the next token.

        Raises:
            ValueError: the grammar does not take it.
        """
        if not self._matcher.consume_token(token):
            raise ValueError(f"the form does not take token {token}: {fault_of(self._matcher)}")

    def copy(self) -> "GrammarConstraint":
        """The same state, apart from this one."""
        return GrammarConstraint(self._matcher.deep_copy(), self._buffer)


class CallsConstraint:
    """Sleeps until the reply opens its tool calls, then follows a grammar to the end of them."""

    def __init__(self, inner: Constraint, tokenizer: Tokenizer, *, is_open: bool = False) -> None:
        """Wait for the mark of tool calls.

        Args:
            inner: begins behind the mark.
            tokenizer: tells the mark, and what stands before it.
            is_open: the mark has come.
        """
        self._inner = inner
        self._tokenizer = tokenizer
        self._mark_id = tokenizer.special_id(DSML)
        self._is_open = is_open
        self._follows_bracket = False

    @property
    def is_finished(self) -> bool:
        """The calls are complete."""
        return self._is_open and self._inner.is_finished

    def mask(self) -> Bools | None:
        """Anything before the calls, then what the grammar allows."""
        return self._inner.mask() if self._is_open else None

    def advance(self, token: int) -> None:
        """Take the next token."""
        if self._is_open:
            self._inner.advance(token)
            return
        self._is_open = self._follows_bracket and token == self._mark_id
        self._follows_bracket = self._tokenizer.token_bytes(token).endswith(b"<")

    def copy(self) -> "CallsConstraint":
        """The same state, apart from this one."""
        copy = CallsConstraint(self._inner.copy(), self._tokenizer, is_open=self._is_open)
        copy._follows_bracket = self._follows_bracket
        return copy


class FormCompiler:
    """Compiles forms in a thread of its own and keeps the newest. Called from one thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Start with nothing; the thread and the library's vocabulary come with the first form."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._buffer = MaskBuffer(vocab_size, max(vocab_size, tokenizer.vocab_size))
        self._pool: ThreadPoolExecutor | None = None
        self._library: Any = None
        self._closer: Closer | None = None
        self._kept: OrderedDict[str, Future[Any]] = OrderedDict()
        self._num_bytes = 0

    def compile(self, form: Form) -> Future[Any]:
        """Begin to compile a form, or find it; the result is for `constraint`."""
        future = self._kept.get(form.grammar)
        if future is not None:
            self._kept.move_to_end(form.grammar)
            return future
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="forms")
        future = self._pool.submit(self._compile, form.grammar)
        self._kept[form.grammar] = future
        self._num_bytes += len(form.grammar)
        while len(self._kept) > MAX_CACHED_FORMS or (
            self._num_bytes > MAX_CACHED_BYTES and len(self._kept) > 1
        ):
            dropped, _ = self._kept.popitem(last=False)
            self._num_bytes -= len(dropped)
        return future

    def constraint(self, form: Form, compiled: Future[Any]) -> Constraint:
        """The constraint of one reply, from what `compile` gave, once that is done.

        Raises:
            RequestError: the form does not compile.
        """
        try:
            matcher = compiled.result(timeout=0)
        except RequestError as error:
            self._forget(form.grammar)
            raise RequestError(
                f"the form of the reply does not compile: {error}", param="form", code=error.code
            ) from error
        constraint = GrammarConstraint(matcher.deep_copy(), self._buffer)
        if form.starts == "calls":
            return CallsConstraint(constraint, self._tokenizer)
        return constraint

    def closer(self, form: Form) -> Closer | None:
        """What completes replies of a form within their limits; None if that was not asked for."""
        if not form.is_completed:
            return None
        if self._closer is None:
            self._closer = Closer(self._tokenizer, self._vocab_size)
        return self._closer

    def _compile(self, grammar: str) -> Any:
        if self._library is None:
            self._library = library_tokenizer(self._tokenizer, self._vocab_size)
        return library_matcher(self._library, grammar)

    def _forget(self, grammar: str) -> None:
        if self._kept.pop(grammar, None) is not None:
            self._num_bytes -= len(grammar)


@dataclass(frozen=True, kw_only=True)
class FormingRequest:
    """A request whose form is being compiled.

    Attributes:
        limit: most tokens of its reply.
        arrived_s: on the engine's clock.
    """

    request: GenerateRequest
    limit: int
    arrived_s: float
    compiled: Future[Any]


class FormingRequests:
    """Requests that wait for their forms, in the order of arrival; not in the queue yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, FormingRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, forming: FormingRequest) -> None:
        """Wait with a request."""
        self._waiting[forming.request.request_id] = forming

    def remove(self, request_id: str) -> FormingRequest | None:
        """Take one out; None if it does not wait."""
        return self._waiting.pop(request_id, None)

    def clear(self) -> list[FormingRequest]:
        """Take all out."""
        everyone = list(self._waiting.values())
        self._waiting.clear()
        return everyone

    def take_ready(self) -> list[FormingRequest]:
        """Take out those whose form is compiled, or failed to."""
        ready = [forming for forming in self._waiting.values() if forming.compiled.done()]
        for forming in ready:
            del self._waiting[forming.request.request_id]
        return ready

    def expired(self, now_s: float) -> list[FormingRequest]:
        """Take out those whose deadline has passed."""
        late = [
            forming
            for forming in self._waiting.values()
            if forming.request.deadline_ms is not None
            and now_s >= forming.arrived_s + 1e-3 * forming.request.deadline_ms
        ]
        for forming in late:
            del self._waiting[forming.request.request_id]
        return late

    def wait(self, timeout_s: float) -> None:
        """Until one is ready, or for so long."""
        futures: Sequence[Future[Any]] = [f.compiled for f in self._waiting.values()]
        if futures:
            wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED)
