"""Trains the demo tokenizer and derives its Engram token map (model specification 3.9).

Byte-level BPE with the pre-tokenizer structure of the V4.1 tokenizer and its special tokens by
text, with the same flags. Does not choose the corpus. Read next: `data.py`, `config.py`.
"""

import json
import re
import unicodedata
from collections.abc import Iterator

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BAR, LOW = "\uff5c", "\u2581"


def _bar(name: str) -> str:
    return f"<{BAR}{name.replace('_', LOW)}{BAR}>"


# text, special flag, normalized flag: as in the V4.1 file
HEAD = (
    (_bar("begin_of_sentence"), True, False),
    (_bar("end_of_sentence"), True, False),
    (_bar("_pad_"), True, False),
)
TAIL = (
    *((_bar(n), False, True) for n in ("System", "fim_hole", "fim_begin", "fim_end")),
    *((_bar(n), False, True) for n in ("User", "Assistant")),
    ("<think>", False, True),
    ("</think>", False, True),
    (f"{BAR}DSML{BAR}", False, True),
    (f"<{BAR}latest_reminder{BAR}>", False, True),
    *((_bar(n), False, True) for n in ("action", "query", "authority", "domain", "title")),
    (f"<{BAR}read_url{BAR}>", False, True),
    (f"<{BAR}deepseek_image{BAR}>", False, False),
)
SPLITS = (
    r"\p{N}",  # V4.1 takes up to three digits; one by one a small model can learn sums
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in SPLITS]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids: BOS, EOS, pad first, the other specials last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAIL),
        special_tokens=[text for text, _, _ in HEAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    for text, special, normalized in (*HEAD, *TAIL):
        token = AddedToken(text, special=special, normalized=normalized)
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([token])
    if tokenizer.get_vocab_size(with_added_tokens=True) != vocab_size:
        raise ValueError("the corpus is too small for the vocabulary size")
    return tokenizer


def _normalize(text: str) -> str:
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M")).lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return " " if text == " " else text.strip()


def token_map(tokenizer: Tokenizer) -> np.ndarray:
    """int64 [vocab]: compressed id of every raw id (model specification 3.9, Token map)."""
    seen: dict[str, int] = {}
    ids = []
    for i in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        raw = tokenizer.id_to_token(i) or ""
        key = raw if "\ufffd" in text else (_normalize(text) or text)
        ids.append(seen.setdefault(key, len(seen)))
    return np.array(ids, np.int64)


def save(tokenizer: Tokenizer, path: str) -> None:
    """tokenizer.json, readable."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(json.loads(tokenizer.to_str()), file, ensure_ascii=False, indent=1)
        file.write("\n")
