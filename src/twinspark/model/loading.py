"""From a pack to a Transformer: the Engram token map, then all weights.

Read next: `transformer.py`, `linear.py`, `pack/weights.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from twinspark.config.model_rules import check_virtual_shards
from twinspark.distributed.collectives import Collectives, SingleRank
from twinspark.errors import ConfigError
from twinspark.kernels.token_map import build_token_map
from twinspark.model.linear import ModelLoader
from twinspark.model.transformer import Transformer
from twinspark.pack.reader import Pack, open_pack
from twinspark.pack.weights import PackWeights


def load_model(
    pack: Pack | Path | str,
    *,
    virtual_shards: int = 2,
    group: Collectives | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    kernel_cache: Path | None = None,
    token_map: npt.NDArray[np.integer] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Transformer:
    """Load this rank's part of a model.

    Args:
        pack: an opened pack, or its folder.
        virtual_shards: V of design D17, 2 or 4; another V gives other bits.
        group: the ranks; a single one when None.
        dtype: bfloat16, or float64 for the wide reference (nothing is rounded but the caches).
        device: where it runs; the CPU when None.
        kernel_cache: folder where compiled kernels are kept between processes, or None.
        token_map: raw id to compressed id; derived from the pack's tokenizer when None. Only
            models with Engram layers need one.
        on_progress: called with fractions 0..1.

    Raises:
        PackError: the pack is damaged or incomplete.
        ConfigError: the tokenizer does not belong to the model, or the shards do not fit it.
    """
    opened = pack if isinstance(pack, Pack) else open_pack(pack)
    config = opened.config
    check_virtual_shards(config, virtual_shards)
    if config.engram_layer_ids and token_map is None:
        token_map = read_token_map(opened.tokenizer_path, config.vocab_size)
    loader = ModelLoader(
        PackWeights(opened),
        group=group or SingleRank(),
        virtual_shards=virtual_shards,
        dtype=dtype,
        device=device,
        kernel_cache=kernel_cache,
        on_progress=on_progress,
    )
    with torch.inference_mode():
        return Transformer(loader, token_map)


def read_token_map(path: Path, vocab_size: int) -> npt.NDArray[np.int32]:
    """The Engram token map of a tokenizer.json (model specification 3.9).

    Ids of the vocabulary that the tokenizer does not have map to 0; they never occur.

    Raises:
        ConfigError: the tokenizer has ids outside the vocabulary.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {size} ids, the model's vocabulary only {vocab_size}: this "
            "tokenizer does not belong to this model"
        )

    def texts() -> Iterator[tuple[str, str]]:
        for token_id in range(size):
            raw = tokenizer.id_to_token(token_id)
            yield tokenizer.decode([token_id], skip_special_tokens=False), raw or ""

    found = build_token_map(texts())
    return np.concatenate([found, np.zeros(vocab_size - size, np.int32)])
