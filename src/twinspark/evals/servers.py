"""Any OpenAI-compatible server as a subject: chat completions, greedy, and what else it offers.

Tokens are counted by its `/tokenize` where it has one, else estimated from one request's usage;
texts are scored by completions with `echo`. Read next: `http_client.py`.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

from twinspark.errors import CapacityError, ConfigError, RequestError
from twinspark.evals.case import NOT_MEASURABLE, Answer, Message
from twinspark.evals.http_client import REFUSED, HttpClient, HttpFailure, key_refused
from twinspark.evals.printable import printable
from twinspark.evals.replies import answer_of, echoed_scores, first_choice, not_scored

PROBE_CHARS = 4000
SHOWN_MODELS = 20
SPECIAL_TOKENS = 16  # that a server may add to those of a text, of which each has a byte or more
CONTEXT_FIELDS = ("max_model_len", "context_length")


class ServerModel:
    """A model behind a URL."""

    def __init__(self, client: HttpClient, *, model: str | None = None) -> None:
        """Find out what the server serves.

        Args:
            client: for its base address, with or without /v1.
            model: to ask; None is the first it lists.

        Raises:
            ConfigError: there is no such server, or no such model.
            CapacityError: the server takes no more requests now.
        """
        self._client = client
        self.place = client.url
        self._api, listed = _find_api(client)
        names = [entry["id"] for entry in listed]
        if model is None and not names:
            raise ConfigError(f"the server at {self._api} lists no model; name one with --model")
        if model is not None and names and model not in names:
            shown = ", ".join(printable(name) for name in names[:SHOWN_MODELS])
            more = f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
            raise ConfigError(
                f"--model is {model!r}, which the server at {self._api} does not list; it lists "
                f"{shown}{more}"
            )
        self.name = names[0] if model is None else model
        entry = next((entry for entry in listed if entry["id"] == self.name), {})
        told = (entry.get(name) for name in CONTEXT_FIELDS)
        self.context_tokens = next((n for n in told if isinstance(n, int) and n > 0), None)
        self._counting = threading.Lock()
        self._tokens_a_char: float | None = None  # set where the server cannot count

    @property
    def notes(self) -> tuple[str, ...]:
        """What was estimated."""
        if self._tokens_a_char is None:
            return ()
        rate = 1 / self._tokens_a_char
        return (f"tokens of texts are estimated: {rate:.2f} characters each, by one request",)

    def ask(
        self, messages: Sequence[Message], fields: Mapping[str, Any], max_tokens: int
    ) -> Answer:
        """One greedy reply. See `Subject`."""
        body = {
            **fields,
            "model": self.name,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        return answer_of(self._post("/chat/completions", body))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, counted by the server or estimated."""
        with self._counting:
            if self._tokens_a_char is None:
                counted = self._counted(text)
                if counted is not None:
                    return counted
                self._tokens_a_char = self._probed()
        return math.ceil(len(text) * self._tokens_a_char)

    def text_scores(self, text: str) -> list[float]:
        """Log-probabilities of the tokens of a text, by completions that echo their prompt."""
        body = {"model": self.name, "prompt": text, "echo": True, "logprobs": 1, "temperature": 0}
        try:
            try:
                reply = self._post("/completions", {**body, "max_tokens": 0})
            except RequestError as error:
                if error.code != REFUSED:
                    raise
                # some servers generate at least one token
                reply = self._post("/completions", {**body, "max_tokens": 1})
        except RequestError as error:
            if error.code != REFUSED:  # it failed this time
                raise
            raise not_scored(str(error)) from error
        return echoed_scores(reply, len(text))

    def cancel(self) -> None:
        """Ask nothing more."""
        self._client.cancel()

    def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            reply = self._client.post(self._api + path, body)
        except HttpFailure as error:
            raise RequestError(
                f"the server does not serve {path} for the model {self.name!r} (HTTP "
                f"{error.status}): {error.message}",
                code=REFUSED,
            ) from error
        first_choice(reply, path)
        return cast("Mapping[str, Any]", reply)

    def _counted(self, text: str) -> int | None:
        """By `/tokenize`, of the server's root or beside the API; None where there is none."""
        body = {"model": self.name, "prompt": text, "add_special_tokens": False}
        for base in dict.fromkeys((self._api.removesuffix("/v1"), self._api)):
            try:
                reply = self._client.post(f"{base}/tokenize", body)
            except HttpFailure:
                continue
            except RequestError as error:
                if error.code != REFUSED:
                    raise
                continue
            count = reply.get("count") if isinstance(reply, dict) else None
            if isinstance(count, int) and not isinstance(count, bool):
                if text and not 0 < count <= len(text.encode()) + SPECIAL_TOKENS:
                    raise RequestError(
                        f"/tokenize says {count} tokens for a text of {len(text)} characters: is "
                        "the server's count of tokens right?",
                        code=NOT_MEASURABLE,
                    )
                return count
        return None

    def _probed(self) -> float:
        """Tokens a character of plain prose, by the usage of one request."""
        text = files("twinspark.evals").joinpath("texts/prose.txt").read_text("utf-8")
        text = text[:PROBE_CHARS]
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0,
        }
        usage = self._post("/chat/completions", body).get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(count, bool) or not isinstance(count, int) or count <= 0:
            raise RequestError(
                "the server neither counts tokens (/tokenize) nor says usage.prompt_tokens, so "
                "texts of a length in tokens cannot be made",
                code=NOT_MEASURABLE,
            )
        return count / len(text)


def _find_api(client: HttpClient) -> tuple[str, list[dict[str, Any]]]:
    """The address under which the API's paths are, and the models it lists.

    Raises:
        ConfigError: no such server, or it refuses the key.
        CapacityError: it takes no more requests.
    """
    tried = [client.url] if client.url.endswith("/v1") else [client.url + "/v1", client.url]
    problem = "it lists no models"
    for api in tried:
        try:
            found = client.get(f"{api}/models")
        except HttpFailure as error:
            if error.status in (401, 403):
                raise key_refused(client.url, error) from error
            if error.status == 429:
                raise CapacityError(
                    f"the server at {client.url} takes no more requests now (HTTP 429): "
                    f"{error.message}; try again later"
                ) from error
            problem = f"HTTP {error.status}: {error.message}"
        except (OSError, ValueError) as error:
            problem = str(getattr(error, "reason", error))
        else:
            data = found.get("data") if isinstance(found, dict) else None
            if isinstance(data, list):
                is_entry = (isinstance(e, dict) and isinstance(e.get("id"), str) for e in data)
                return api, [entry for entry, fits in zip(data, is_entry, strict=True) if fits]
    raise ConfigError(
        f"--base-url {client.url} is no OpenAI-compatible server: {tried[0]}/models gave no list "
        f"of models ({problem}); check the address, and that the server has started"
    )
