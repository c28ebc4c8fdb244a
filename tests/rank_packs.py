"""TINY packs with a tokenizer of their own, for processes that load them as any other pack."""

import shutil
from functools import cache
from pathlib import Path

import numpy as np
from tests import tiny
from tests.golden import tiny_weights
from tests.small_tokenizer import small_tokenizer_json

from twinspark.model.loading import read_token_map
from twinspark.text.tokenizer import Tokenizer

FOUR_UNEVEN = {"o_groups": 4, "moe_intermediate_size": 640, "vocab_size": 896}
"""Sizes that four virtual shards cut into 2, 1, 1 and 1 blocks."""


@cache
def whole_pack(kind: str, **changes: int) -> Path:
    """TINY, "plain" or "exl3", with text config fields changed and the small tokenizer."""
    folder = tiny.plain_path().parent / "-".join(["whole", kind, *map(str, changes.values())])
    tokenizer_path = folder.with_suffix(".json")
    tokenizer_path.write_text(small_tokenizer_json())
    tokenizer = Tokenizer.from_file(tokenizer_path)
    vocab = int(changes.get("vocab_size", tiny.CONFIG["text_config"]["vocab_size"]))
    ids = read_token_map(tokenizer_path, vocab)
    changes = {"engram_compressed_vocab_size": len(np.unique(ids)), **changes}
    document = dict(tiny.CONFIG, text_config=dict(tiny.CONFIG["text_config"], **changes))
    document |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if kind == "plain":
        tiny_weights.write_pack(folder, document)
        shutil.copy(tokenizer_path, folder / "tokenizer.json")
    else:
        files: dict[str, bytes | Path] = {"tokenizer.json": tokenizer_path}
        tiny.write_exl3(folder, document=document, extra_files=files)
    return folder
