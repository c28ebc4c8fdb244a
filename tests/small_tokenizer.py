"""A byte-level BPE of a few hundred tokens with the special tokens of V4.1 under other ids."""

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from twinspark.text.tokenizer import PAD, REQUIRED

DSML = "\uff5cDSML\uff5c"
EXTRA = ("<\uff5cquery\uff5c>", "<|EOT|>", "<|place_holder_mm_span_0021|>")
TEXTS = (
    "Let me think about that. The answer is four, and the question was two and two.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "Stop here. <b>bold</b> and <i>think</i>, then stop again.\n\n\nThe end.",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0 \U0001f389 caf\u00e9 na\u00efve",
)


@cache
def small_tokenizer_json(vocab_size: int = 360) -> str:
    """Content of its tokenizer.json; specials come first and stand in the vocabulary too."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, *reversed(REQUIRED), DSML, *EXTRA],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(TEXTS * 4, trainer)
    return engine.to_str()


def edited(**changes: object) -> str:
    """The file with top-level fields replaced; `model` is merged."""
    parsed = json.loads(small_tokenizer_json())
    model = changes.pop("model", {})
    assert isinstance(model, dict)
    parsed.update(changes)
    parsed["model"].update(model)
    return json.dumps(parsed)
