"""Shapes of plain completions: whole objects, chunks, and log-probabilities in the older form."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinspark.messages import TokenScore
from twinspark.server.chat_replies import ReplyHead
from twinspark.text.tokenizer import Tokenizer


def completion(
    head: ReplyHead, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A whole reply, or a chunk of a stream: they have one shape."""
    top = {
        "id": head.reply_id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
        "choices": list(choices),
    }
    return top if usage is None else top | {"usage": usage}


def choice(
    index: int,
    text: str,
    *,
    logprobs: Mapping[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """A choice, or what a round added to it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class Scores:
    """Log-probabilities of one choice in the older form, as they come.

    Offsets count characters of the returned text. A token that is no whole character is written as
    its bytes, and the text it stands in may come with a later token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_characters = 0
        self._half = b""

    def block(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """The next tokens: four lists of the same length."""
        found: dict[str, Any] = {
            "text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []
        }  # fmt: skip
        for score in scores:
            self._add(found, score.token_id, score.logprob, self._top(score))
        return found

    def prompt_block(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> dict[str, Any]:
        """The prompt's tokens; what has no token before it has no score.

        Args:
            ids: those of the prompt that are echoed.
            scores: of the last of them, as many as there are.
        """
        found = self.block(())
        num_bare = len(ids) - len(scores)
        for token in ids[:num_bare]:
            self._add(found, token, None, None)
        rest = self.block(scores)
        return {name: found[name] + rest[name] for name in found}

    def _add(
        self,
        found: dict[str, Any],
        token: int,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        found["tokens"].append(token_name(self._tokenizer, token))
        found["token_logprobs"].append(logprob)
        found["top_logprobs"].append(top)
        found["text_offset"].append(self._num_characters)
        text = (self._half + self._tokenizer.token_bytes(token)).decode("utf-8", "ignore")
        whole = text.encode()
        self._half = (self._half + self._tokenizer.token_bytes(token))[len(whole) :][:3]
        self._num_characters += len(text)

    def _top(self, score: TokenScore) -> dict[str, float]:
        """The likeliest and the chosen token; the first of two with one name counts."""
        found: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token_id, score.logprob)):
            found.setdefault(token_name(self._tokenizer, token), logprob)
        return found


def token_name(tokenizer: Tokenizer, token: int) -> str:
    r"""A token as text, or as `bytes:\xe3\x81` where it is no whole character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(
    tokenizer: Tokenizer, num_tokens: int, scores: Sequence[TokenScore]
) -> list[dict[str, Any] | None]:
    """VLLM's form: for each prompt token the scores of likely ids by id, None where there is none.

    The rank is that among the likeliest that were asked for, None for a token that is not in it.
    """
    found: list[dict[str, Any] | None] = [None] * (num_tokens - len(scores))
    for score in scores:
        entry = {
            str(token): _ranked(tokenizer, token, logprob, n + 1)
            for n, (token, logprob) in enumerate(score.top)
        }
        entry.setdefault(
            str(score.token_id), _ranked(tokenizer, score.token_id, score.logprob, None)
        )
        found.append(entry)
    return found


def _ranked(tokenizer: Tokenizer, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token)}
