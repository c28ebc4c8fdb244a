"""What a reply must follow: from the fields of a request to one grammar, and where that starts.

Pure: nothing is compiled here. Grammars are text of llguidance: Lark with JSON schemas in it, and
special tokens by their ids. Read next: `grammar_json.py`, `grammar_calls.py`, `grammar_check.py`.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinspark.errors import RequestError
from twinspark.messages import MAX_FORM_BYTES, CallSettings, Form
from twinspark.text.fields import not_supported, read_flag, read_object, read_text, shown
from twinspark.text.grammar_calls import CallGrammar
from twinspark.text.grammar_json import json_rule, literal
from twinspark.text.segments import encode_segments
from twinspark.text.template import ChatPrompt, ChatRequest
from twinspark.text.tokenizer import DSML, Tokenizer
from twinspark.text.tools import ToolOffer

MAX_CHOICES = 20_000
MAX_GBNF_CHARACTERS = 32 << 10
GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_OUTPUT_FIELDS = ("json", "json_object", "regex", "choice", "grammar")
_COMPLETE = "ensure_complete"  # the reply's last tokens are spent on completing the form
# strings, patterns and comments of Lark, in which nothing names a token
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_TOKEN_NAME = re.compile(r"<[\[|][^>]*>?|<[A-Za-z_][\w-]*>")
_GBNF_RULE = re.compile(r"^\s*([A-Za-z][\w-]*)\s*::=", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ReplyForm:
    """What a reply must follow, as its request wants it.

    Attributes:
        calls: how the engine reads tool calls; None if the reply may have none.
        forced_ids: what must follow the thinking block.
        form: the grammar, or None.
        fallback: a looser grammar that serves when `form` cannot be compiled; None if that is an
            error of the request.
        param: the field that the grammar came from, for messages.
    """

    calls: CallSettings | None = None
    forced_ids: tuple[int, ...] = ()
    form: Form | None = None
    fallback: Form | None = None
    param: str = ""


@dataclass(frozen=True)
class _Wanted:
    """A grammar that the request spells out: as a rule's right side, or a grammar of its own."""

    param: str
    rule: str = ""
    grammar: str = ""
    is_completed: bool = False


def chat_form(
    body: Mapping[str, Any],
    request: ChatRequest,
    prompt: ChatPrompt,
    tokenizer: Tokenizer,
    *,
    hold_calls: bool = False,
) -> ReplyForm:
    """What the reply to a chat request must follow.

    Args:
        body: the request's JSON; `response_format`, the guided fields and `structured_outputs`
            are read.
        request: the same, checked.
        prompt: the same, rendered.
        tokenizer: of the pack that answers.
        hold_calls: tool calls are held to their schemas even where the model is free not to call.

    Raises:
        RequestError: a field is wrong, or two of them ask for different things.
    """
    wanted = read_wanted(body)
    if wanted is not None and prompt.continues and not prompt.in_reasoning:
        raise RequestError(
            f"{wanted.param} says what a whole answer looks like, so it cannot go with a message "
            "that the reply continues; leave one of them out",
            param=wanted.param,
        )
    offer = request.offer
    if offer is None or prompt.calls is None:
        return ReplyForm() if wanted is None else _alone(wanted, "after_reasoning")
    if wanted is not None and offer.choice != "auto":
        raise RequestError(
            f"{wanted.param} says what the answer looks like, but tool_choice asks for a call; "
            "leave one of them out",
            param=wanted.param,
        )
    if wanted is not None and wanted.is_completed:
        raise RequestError(
            f"{_COMPLETE} cannot be promised where the reply may be tool calls instead; leave the "
            "tools out",
            param=_COMPLETE,
        )
    rules = prompt.calls
    calls = CallSettings(parallel=rules.parallel, opened=rules.opened, called=rules.called)
    forced_ids = tuple(encode_segments(tokenizer, prompt.forced))
    is_strict = hold_calls or any(tool.strict for tool in offer.tools)
    if wanted is None and offer.choice == "auto" and not is_strict:
        return ReplyForm(calls=calls)
    mark = _mark_id(tokenizer)
    param = _place_of(offer) if wanted is None else wanted.param
    form = _with_calls(offer, wanted, mark, loose=wanted is not None and not is_strict)
    fallback = None
    if wanted is None and not any(tool.strict for tool in offer.tools):
        fallback = _with_calls(offer, None, mark, loose=True)
    return ReplyForm(calls=calls, forced_ids=forced_ids, form=form, fallback=fallback, param=param)


def text_form(body: Mapping[str, Any]) -> ReplyForm:
    """The same for a prompt without messages; the grammar starts with the reply.

    Raises:
        RequestError: as `chat_form`.
    """
    wanted = read_wanted(body)
    return ReplyForm() if wanted is None else _alone(wanted, "reply")


def read_wanted(body: Mapping[str, Any]) -> _Wanted | None:
    """The grammar that a request spells out, by whichever field.

    Raises:
        RequestError: a field is wrong, or two ask for something.
    """
    found = [_of_format(body), _of_outputs(body)]
    found += [_of(name, body[name], name.removeprefix("guided_"))
              for name in GUIDED_FIELDS if body.get(name) is not None]  # fmt: skip
    wanted = [item for item in found if item is not None]
    if len(wanted) > 1:
        raise RequestError(
            f"{wanted[0].param} and {wanted[1].param} both say what the reply looks like; send one",
            param=wanted[1].param,
        )
    if not wanted:
        return None
    is_completed = any(
        isinstance(outer, Mapping) and read_flag(outer, _COMPLETE, f"{name}.{_COMPLETE}")
        for name in ("response_format", "structured_outputs")
        if (outer := body.get(name)) is not None
    )
    return replace(wanted[0], is_completed=is_completed)


def _of_format(body: Mapping[str, Any]) -> _Wanted | None:
    raw = body.get("response_format")
    if raw is None:
        return None
    where = "response_format"
    kind = read_object(raw, where).get("type")
    if kind == "json_object":
        return _Wanted(where, json_rule({"type": "object"}, where))
    if kind == "regex":
        return _of(f"{where}.pattern", raw.get("pattern", raw.get("regex")), "regex")
    if kind != "json_schema":
        return None
    where += ".json_schema"
    outer = read_object(raw.get("json_schema"), where)
    lenient = not read_flag(outer, "strict", f"{where}.strict", default=True)
    schema = read_object(outer.get("schema"), f"{where}.schema")
    return _Wanted(f"{where}.schema", json_rule(schema, f"{where}.schema", lenient=lenient))


def _of_outputs(body: Mapping[str, Any]) -> _Wanted | None:
    raw = body.get("structured_outputs")
    if raw is None:
        return None
    where = "structured_outputs"
    known = {*_OUTPUT_FIELDS, _COMPLETE}
    other = [n for n, value in read_object(raw, where).items() if value and n not in known]
    if other:
        raise not_supported(f"{where}.{other[0][:60]}")
    given = [n for n in _OUTPUT_FIELDS if raw.get(n) not in (None, False)]
    if len(given) != 1:
        raise RequestError(
            f"{where} has {', '.join(given) or 'none'} of {', '.join(_OUTPUT_FIELDS)}, expected "
            "exactly one",
            param=where,
        )
    return _of(f"{where}.{given[0]}", raw[given[0]], given[0])


def _of(where: str, value: Any, kind: str) -> _Wanted:
    if kind == "json_object":
        if value is not True:
            raise RequestError(f"{where} must be true or false", param=where)
        return _Wanted(where, json_rule({"type": "object"}, where))
    if kind == "json":
        return _Wanted(where, json_rule(_parsed(value, where), where))
    if kind == "regex":
        return _Wanted(where, f"/{_slashed(read_text(value, where), where)}/")
    if kind == "choice":
        return _Wanted(where, grammar=_choices(value, where))
    return _Wanted(where, grammar=_lark(read_text(value, where), where))


def _parsed(value: Any, where: str) -> Any:
    """A schema, or JSON text of one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is no JSON: {error}", param=where) from error


def _choices(value: Any, where: str) -> str:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise RequestError(f"{where} must be a list of 1 to {MAX_CHOICES} texts", param=where)
    texts = [read_text(text, f"{where}[{n}]") for n, text in enumerate(value)]
    if "" in texts:
        raise RequestError(f"{where} has an empty text, expected at least one character in each",
                           param=where)  # fmt: skip
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, dict.fromkeys(texts)))


def _slashed(pattern: str, where: str) -> str:
    """A pattern between slashes, for the whole reply."""
    import llguidance

    if not pattern:
        raise RequestError(f"{where} is empty, expected a pattern", param=where)
    inside = pattern.removeprefix("^")
    before = inside.removesuffix("$")
    if (len(before) - len(before.rstrip("\\"))) % 2 == 0:
        inside = before
    text: str = llguidance.regex_to_lark(inside, "")
    return text.replace("\n", "\\n")


def _lark(text: str, where: str) -> str:
    """A client's grammar: Lark as it is, GBNF (`::=`) translated."""
    if "::=" not in text:
        named = _TOKEN_NAME.search(_LARK_TEXT.sub(" ", text))
        if named is not None:
            raise RequestError(
                f"{where} names a token, {shown(named[0])}; a grammar is of text: where it is "
                "complete, the reply ends by itself",
                param=where,
            )
        return text
    if len(text) > MAX_GBNF_CHARACTERS:
        raise RequestError(
            f"{where} has {len(text)} characters, expected at most {MAX_GBNF_CHARACTERS} of EBNF",
            param=where,
        )
    names = Counter(_GBNF_RULE.findall(text))
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise RequestError(f"{where} defines the rule {shown(twice)} twice", param=where)
    if "root" not in names:
        raise RequestError(f"{where} has no rule root, where a grammar begins", param=where)
    from llguidance import gbnf_to_lark

    try:
        return str(gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # the translator raises whatever comes
        raise RequestError(f"{where} cannot be read: {shown(str(error))}", param=where) from error


def _alone(wanted: _Wanted, starts: Any) -> ReplyForm:
    grammar = wanted.grammar or f"start: {wanted.rule}"
    form = replace(_form(grammar, starts, wanted.param), is_completed=wanted.is_completed)
    return ReplyForm(form=form, param=wanted.param)


def _with_calls(offer: ToolOffer, wanted: _Wanted | None, mark: int, *, loose: bool) -> Form:
    """A form with tool calls in it: only them, or them beside what else the reply may be."""
    calls = CallGrammar(offer, dsml_id=mark, loose=loose)
    if wanted is not None:
        start = f"@answer | {calls.whole_block()}"
        lines = [f"start: {start}", *calls.rules]
        answer = wanted.grammar or f"start: {wanted.rule}"
        grammars = [
            {"name": "reply", "lark_grammar": "\n".join(lines)},
            {"name": "answer", "lark_grammar": answer},
        ]
        return _form(json.dumps({"grammars": grammars}), "after_reasoning", wanted.param)
    if offer.choice == "auto":
        start = calls.after_mark()
    else:
        start = calls.in_call() if offer.choice == "named" else calls.in_block()
    grammar = "\n".join([f"start: {start}", *calls.rules])
    return _form(grammar, "calls" if offer.choice == "auto" else "after_reasoning", "tools")


def _place_of(offer: ToolOffer) -> str:
    """The schema that a grammar of calls comes from where it is only one."""
    held = [n for n, tool in enumerate(offer.tools)
            if tool.strict and (offer.choice != "named" or tool.name == offer.name)]  # fmt: skip
    return f"tools[{held[0]}].function.parameters" if len(held) == 1 else "tools"


def _form(grammar: str, starts: Any, param: str) -> Form:
    size = len(grammar.encode())
    if size > MAX_FORM_BYTES:
        raise RequestError(
            f"{param} makes a grammar of {size} bytes, expected at most {MAX_FORM_BYTES}; "
            "send less",
            param=param,
        )
    return Form(grammar=grammar, starts=starts)


def _mark_id(tokenizer: Tokenizer) -> int:
    token_id = tokenizer.special_id(DSML)
    if token_id is None:
        raise RequestError(
            f"this model's vocabulary has no token {DSML}, which tool calls need; leave tools out",
            param="tools",
            code="unsupported",
        )
    return token_id
