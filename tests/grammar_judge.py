"""Judges texts by a form with the grammar library itself, token by token."""

from dataclasses import dataclass

from twinspark.text.grammar import chat_form
from twinspark.text.grammar_library import library_matcher, library_tokenizer
from twinspark.text.template import read_request, render_chat

D = "\uff5cDSML\uff5c"


@dataclass
class Judge:
    """Says how far a form goes along with a text."""

    tokenizer: object
    library: object

    @classmethod
    def of(cls, tokenizer):
        return cls(tokenizer, library_tokenizer(tokenizer, tokenizer.vocab_size))

    def accepts(self, form, text, *, plain=False):
        """Whether a form takes the whole text and is complete then."""
        matcher = library_matcher(self.library, form.grammar)
        encode = self.tokenizer.encode_plain if plain else self.tokenizer.encode_full
        return all(map(matcher.consume_token, encode(text))) and matcher.is_accepting()

    def allowed(self, form, text=""):
        """Ids that may follow a text."""
        import numpy as np

        matcher = library_matcher(self.library, form.grammar)
        for token in self.tokenizer.encode_full(text):
            assert matcher.consume_token(token), f"{text!r} is refused at {token}"
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())


def tool(name, properties=None, *, required=(), strict=False, **rest):
    parameters = {"type": "object", "properties": properties or {}, **rest}
    if required:
        parameters["required"] = list(required)
    function = {"name": name, "parameters": parameters}
    return {"type": "function", "function": {**function, "strict": True} if strict else function}


def form_of(tokenizer, *, thinks=False, hold_calls=False, **fields):
    """What a chat request with these fields must follow."""
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "thinking": {"type": "enabled" if thinks else "disabled"},
        **fields,
    }
    request = read_request(body, serves={"tools", "response_format"})
    return chat_form(body, request, render_chat(request), tokenizer, hold_calls=hold_calls)


def call(name, *parameters):
    inside = "\n".join(parameters)
    return f'<{D} invoke name="{name}">\n{inside}\n</{D} invoke>'


def parameter(name, value, *, is_text=True):
    flag = "true" if is_text else "false"
    return f'<{D} parameter name="{name}" string="{flag}">{value}</{D} parameter>'


def block(*calls):
    return "\n".join(calls) + f"\n</{D} calls>"
