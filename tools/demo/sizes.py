"""What a training step needs: bytes kept for the backward pass and FLOPs a token, by form.

    python -m tools.demo.sizes [--tokens 1024]

Bytes are counted on this machine on a small batch of the real configuration, without compilation
(which keeps less), and scaled to a step; FLOPs follow from the shapes. Read next: `curriculum.py`.
"""

import argparse
from typing import Any

import torch
from tools.demo.config import demo_config
from tools.demo.curriculum import TOKENS, Form, Plan
from tools.demo.finds import finds_of
from tools.demo.init import initial
from tools.demo.optim import is_matrix
from tools.demo.rows import CHUNK_BYTES
from tools.demo.twin import Twin


class Kept:
    """Distinct storages that the backward pass holds, parameters left out."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in params.values()}
        self.bytes: dict[int, int] = {}
        self.held: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor as autograd saves it."""
        place = tensor.untyped_storage().data_ptr()
        if place not in self.own:
            self.bytes[place] = tensor.untyped_storage().nbytes()
            self.held.append(tensor)
        return tensor


def real_twin() -> Twin:
    """Initial parameters of the demo model, matrices in bf16 as training has them."""
    config = demo_config(compressed_vocab=3161, noise_token_id=4090, image_token_id=4091)
    twin = Twin(config, torch.arange(4096) % 3161)
    twin.params = {
        n: (p.bfloat16() if is_matrix(n) else p).requires_grad_()
        for n, p in initial(config).items()
        if not n.startswith("mtp.")
    }
    return twin


def kept_bytes(twin: Twin, form: Form) -> int:
    """Bytes kept for the backward pass of one batch of this form."""
    ids = torch.arange(form.length).repeat(form.batch, 1) % 4000 + 3
    find = torch.full(ids.shape, -1)
    find[:, form.length // 2] = 3
    kept = Kept(twin.params)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        state = twin.start(ids, dense=form.dense, long=form.long, recompute=form.recompute,
                           finds=finds_of(find, 32), leak=0.1)  # fmt: skip
        h = twin.hidden(ids, state)
        (h @ twin.params["head.weight"].to(h.dtype).t()).float().logsumexp(-1)
    return sum(kept.bytes.values())


def flops(text: dict[str, Any], length: int, *, long: bool) -> dict[str, float]:
    """Forward FLOPs a token: weights, attention, index scores."""
    d, heads, dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    layers = text["num_hidden_layers"]
    experts = (text["n_routed_experts"] + 1) * 3 * d * text["moe_intermediate_size"]
    low = text["o_groups"] * text["o_lora_rank"]
    attention = d * text["q_lora_rank"] + text["q_lora_rank"] * heads * dim + d * dim
    attention += heads * dim * text["o_lora_rank"] + low * d
    mixers = 2 * 24 * text["hc_mult"] * d
    weights = layers * (experts + attention + mixers) + text["vocab_size"] * d
    ratios = [r for r in text["compress_ratios"] if r]
    rows = sum(text["index_topk"] if long else length / r for r in ratios)
    window = layers * 2 * text["sliding_window"]
    index = sum(length / text["compress_ratios"][n] for n in text["index_source_layer_ids"])
    if long:  # the sources after the candidates score those only
        first = text["candidate_source_layer_id"]
        index = (
            sum(
                length / 2 / text["compress_ratios"][n]  # causal: half of the rows on average
                for n in text["index_source_layer_ids"]
                if n <= first
            )
            + text["candidate_topk_blocks"] * text["candidate_block_size"]
        )
    return {
        "weights": 2.0 * weights,
        "attention": 4.0 * heads * dim * (rows + window),
        "index": 2.0 * text["index_n_heads"] * text["index_head_dim"] * index,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of the batch that is measured")
    args = parser.parse_args()
    twin, plan = real_twin(), Plan()
    print(f"{sum(p.numel() for p in twin.params.values()) / 1e6:.1f}M backbone parameters")
    for length, _ in plan.shares:
        for form in (plan.form(length, dense=False), plan.form(length, dense=False).smaller()):
            if form is None or (form.recompute and not form.long):
                continue
            part = Form(args.tokens, 1, False, form.long, form.recompute)
            each = kept_bytes(twin, part) / args.tokens
            if not form.long:  # kept scores grow with the rows that a token sees
                half = kept_bytes(twin, Form(args.tokens // 2, 1)) * 2 / args.tokens
                each += (each - half) * (length / args.tokens - 1) * 2
            work = flops(twin.text, length, long=form.long)
            print(
                f"{form.batch} x {length}{' long' if form.long else ''}"
                f"{' recompute' if form.recompute else ''}: {each / 1024:.0f} KiB kept a token, "
                f"{each * TOKENS / 2**30:.0f} GiB a step and at most {CHUNK_BYTES * 3 >> 30} GiB "
                f"of scores at once; forward MFLOP a token: "
                + ", ".join(f"{k} {v / 1e6:.0f}" for k, v in work.items())
            )


if __name__ == "__main__":
    main()
