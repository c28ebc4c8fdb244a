"""Tool calls as grammar text: the very markup of prompt format 7, with values held to schemas.

Strings are written raw, everything else as JSON; parameters come in the schema's order, required
ones always. The grammar begins behind the mark of the block's opening tag or inside the block, as
the prompt or the forced ids left it. Read next: `grammar_values.py`, `grammar.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from twinspark.errors import RequestError
from twinspark.messages import MAX_FORM_BYTES
from twinspark.text.fields import shown
from twinspark.text.grammar_json import SchemaRoot, closed_objects, literal
from twinspark.text.grammar_values import free_value, value_rule
from twinspark.text.tools import Tool, ToolOffer

BLOCK_TAG = " calls>\n"
# One lexeme, as the line feed before a closing tag is: lexemes are matched greedily, none is
# taken back.
_NEXT = literal("\n<")
_UNFOLLOWED = frozenset({  # at the root, where calls are written parameter by parameter
    "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "else",
    "enum", "if", "maxProperties", "minProperties", "not", "oneOf", "patternProperties",
    "propertyNames", "then", "unevaluatedProperties",
})  # fmt: skip


class CallGrammar:
    """Collects the rules for the calls of one request.

    Attributes:
        rules: lines of the grammar so far.
    """

    def __init__(self, offer: ToolOffer, *, dsml_id: int, loose: bool = False) -> None:
        """Write the rules of every tool that may be called.

        Args:
            offer: the tools; of a named one only that.
            dsml_id: the mark of the markup.
            loose: values are held to their types only, as a last resort.

        Raises:
            RequestError: a tool's schema cannot be followed.
        """
        self.rules: list[str] = []
        self._mark = f"<[{dsml_id}]>"
        self._loose = loose
        self._size = 0
        self._bodies: list[tuple[str, str]] = []
        for number, tool in enumerate(offer.tools):
            if offer.choice != "named" or tool.name == offer.name:
                self._bodies.append((tool.name, self._body(number, tool)))
        self._many = offer.parallel and offer.choice != "named"
        self._write_block()

    def after_mark(self) -> str:
        """The rule for what follows the mark of the block's opening tag."""
        self.rules.append(f"after_mark: {literal(BLOCK_TAG)} in_block")
        return "after_mark"

    def whole_block(self) -> str:
        """The rule for a whole block with the line feeds before it."""
        name = self.after_mark()
        opening = literal("\n\n<")
        self.rules.append(f"whole_block: {opening} {self._mark} {name}")
        return "whole_block"

    def in_block(self) -> str:
        """The rule for what follows the opening tag of the block."""
        return "in_block"

    def in_call(self) -> str:
        """The rule for what follows the opening tag of the only call there may be."""
        self.rules.append(f"in_call: {self._bodies[0][1]} end_block")
        return "in_call"

    def _write_block(self) -> None:
        calls = " | ".join(
            literal(f' invoke name="{name}">\n') + f" {body}" for name, body in self._bodies
        )
        self.rules += [
            f"call: {self._mark} ({calls})",
            f"end_block: {literal(chr(10) + '</')} {self._mark} {literal(' calls>')}",
        ]
        if self._many:
            self.rules += [
                f'more: "" | more {_NEXT} call',
                'in_block: "<" call more end_block',
            ]
        else:
            self.rules.append('in_block: "<" call end_block')

    def _body(self, number: int, tool: Tool) -> str:
        """The rule for a call from its parameters to its closing tag."""
        where = f"tools[{number}].function.parameters"
        root = SchemaRoot(tool.parameters, where)
        if tool.strict:
            _check_root(root.schema, where)
            root = SchemaRoot(closed_objects(root.schema), where)
        names = self._parameters(number, root, where, is_strict=tool.strict)
        has_more = self._takes_more(root.schema)
        if has_more:
            self._write_more(number, root, where, is_strict=tool.strict)
        parameters = self._sequence(number, names, has_more=has_more)
        name = f"t{number}_body"
        end = f"{literal(chr(10) + '</')} {self._mark} {literal(' invoke>')}"
        self.rules.append(f"{name}: {parameters} {end}")
        return name

    def _parameters(
        self, number: int, root: SchemaRoot, where: str, *, is_strict: bool
    ) -> list[tuple[str, bool]]:
        """A rule for each listed parameter, and whether it must be there."""
        schema = root.schema
        properties = schema.get("properties")
        listed: dict[str, Any] = dict(properties) if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        texts = required if isinstance(required, list) else []
        needed = {name: None for name in texts if isinstance(name, str)}
        for key in needed:
            listed.setdefault(key, {})
        rules: list[tuple[str, bool]] = []
        for place, (key, part) in enumerate(listed.items()):
            if '"' in key:
                raise RequestError(
                    f"{where} has a parameter {shown(key)}, whose name the format cannot write; "
                    "expected names without quotation marks",
                    param=where,
                )
            name = f"t{number}_p{place}"
            place_of = f"{where}.properties.{key}"
            value = value_rule(
                part, root, place_of,
                prefix=f"T{number}P{place}", mark=self._mark, lenient=not is_strict,
                loose=self._loose,
            )  # fmt: skip
            self._add(value.rules, where)
            tag = literal(f' parameter name="{key}" string="')
            self.rules.append(f"{name}: {self._mark} {tag} ({value.alternatives})")
            rules.append((name, key in needed))
        return rules

    def _add(self, rules: Sequence[str], where: str) -> None:
        """Take rules with values in them, as long as the whole stays within its limit."""
        self.rules += rules
        self._size += sum(map(len, rules))
        if self._size > MAX_FORM_BYTES:
            raise RequestError(
                f"{where} makes a grammar of more than {MAX_FORM_BYTES} characters; send less, or "
                "refer to large definitions less often",
                param=where,
            )

    def _takes_more(self, schema: Mapping[str, Any]) -> bool:
        """Whether parameters that are not listed may follow."""
        more = schema.get("additionalProperties")
        if more is None or more is True:
            has_listed = isinstance(schema.get("properties"), Mapping) and schema["properties"]
            return more is True or not has_listed
        return isinstance(more, Mapping) and bool(more)

    def _sequence(
        self, number: int, parameters: Sequence[tuple[str, bool]], *, has_more: bool
    ) -> str:
        """Parameters with one line feed between; those that may miss may miss.

        Two rules a place: whether one came before decides about the line feed.
        """
        first, later = f"t{number}_a", f"t{number}_b"
        end = len(parameters)
        if has_more:
            self.rules += [
                f'{first}{end}: "" | "<" t{number}_more {later}{end}',
                f'{later}{end}: "" | {later}{end} {_NEXT} t{number}_more',
            ]
        else:
            self.rules += [f'{first}{end}: ""', f'{later}{end}: ""']
        for place in range(end - 1, -1, -1):
            name, is_needed = parameters[place]
            following = place + 1
            skip = ("", "") if is_needed else (f" | {first}{following}", f" | {later}{following}")
            self.rules += [
                f'{first}{place}: "<" {name} {later}{following}{skip[0]}',
                f"{later}{place}: {_NEXT} {name} {later}{following}{skip[1]}",
            ]
        return f"{first}0"

    def _write_more(self, number: int, root: SchemaRoot, where: str, *, is_strict: bool) -> None:
        """The rule for a parameter that is not listed."""
        schema, prefix = root.schema.get("additionalProperties"), f"T{number}M"
        if isinstance(schema, Mapping) and schema:
            value = value_rule(
                schema, root, f"{where}.additionalProperties",
                prefix=prefix, mark=self._mark, lenient=not is_strict, loose=self._loose,
            )  # fmt: skip
        else:
            value = free_value(prefix=prefix, mark=self._mark)
        self._add(value.rules, where)
        tag, quote = literal(' parameter name="'), literal('" string="')
        self.rules += [
            f'T{number}NAME: /[^"\\n]{{1,256}}/',
            f"t{number}_more: {self._mark} {tag} T{number}NAME {quote} ({value.alternatives})",
        ]


def _check_root(schema: Mapping[str, Any], where: str) -> None:
    """Refuse what strict parameters say as a whole and no call is held to."""
    for key in _UNFOLLOWED & schema.keys():
        if not (key == "unevaluatedProperties" and schema[key] is False):
            raise RequestError(
                f"{where}.{key} is not followed for the parameters of a strict tool as a whole; "
                "expected properties, required and additionalProperties there",
                param=f"{where}.{key}",
            )
