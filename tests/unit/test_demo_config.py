"""The demo model's real configuration in the product: accepted, loaded, and computed alike."""

import json

import pytest
import torch
from tests.unit.model.harness import Session
from tools.demo import rehearsal
from tools.demo.checkpoint import TEXT_FILES, save, to_release, write_index
from tools.demo.config import TEXT, demo_config, refresh
from tools.demo.init import initial
from tools.demo.make_pack import MAX_BYTES, largest_budget
from tools.demo.packs import open_pack, twin_params, widths_of
from tools.demo.twin import Twin

from twinspark.model.loading import load_model, read_token_map

LENGTH = 150  # beyond the window and, at ratio 1, beyond index_topk


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random checkpoint of the real configuration, with the demo's own tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    small = rehearsal.small_config()
    (folder / "config.json").write_text(json.dumps(small))
    config = refresh(folder)
    for name in TEXT_FILES:
        if (rehearsal.PACK / name).is_file():
            (folder / name).write_bytes((rehearsal.PACK / name).read_bytes())
    tensors = to_release(initial(config), config["text_config"])
    save(tensors, folder, "model", limit=15_000_000)
    write_index(folder)
    return folder


def test_refresh_keeps_what_follows_from_the_tokenizer(checkpoint):
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    small = rehearsal.small_config()["text_config"]
    kept = ("engram_compressed_vocab_size", "dspark_noise_token_id")
    assert {k: text[k] for k in kept} == {k: small[k] for k in kept}
    assert {k: text[k] for k in TEXT} == TEXT


def test_the_product_computes_what_the_twin_computes(checkpoint):
    pack = open_pack(checkpoint)
    token_map = read_token_map(checkpoint / "tokenizer.json", 4096)
    twin = Twin(json.loads((checkpoint / "config.json").read_text()), torch.from_numpy(token_map))
    twin.params = {n: p.double() for n, p in twin_params(pack).items()}
    ids = torch.randint(3, 4079, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    model = load_model(checkpoint, dtype=torch.float64)
    wanted = Session(model).feed(ids)
    for long in (False, True):
        logits, _ = twin.logits(torch.tensor([ids]), exact=True, long=long)
        assert (logits[0] - wanted).abs().max() < 1e-4


def test_a_pack_of_it_fits_with_the_bits_that_were_planned(checkpoint):
    """With scales, headers, tokenizer and the Engram tables, before any quantizing."""
    assert MAX_BYTES < 24_000_000
    assert largest_budget(open_pack(checkpoint), mtp_bits=4.0) > 3.9
    config = json.loads((checkpoint / "config.json").read_text())
    count = sum(p.numel() for p in initial(config).values())
    assert 25_000_000 < count < 45_000_000


def test_widths_of_a_pack_of_one_number(checkpoint):
    widths = widths_of(open_pack(checkpoint), "3", None)
    assert set(widths.values()) == {3, 6} and widths["head"] == 6
    with pytest.raises(ValueError, match="expected mix or a number"):
        widths_of(open_pack(checkpoint), "9", None)


def test_demo_config_takes_only_what_the_tokenizer_decides():
    config = demo_config(compressed_vocab=3000, noise_token_id=4090, image_token_id=4091)
    assert config["text_config"]["vocab_size"] == 4096
    assert len(config["text_config"]["engram_num_embeddings"]) == 2
