"""Held-out loss, greedy and sampled text, and accepted drafts a round of the twin.

Read next: `train.py`.
"""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tools.demo.batches import MIX, Batches
from tools.demo.draft import draft_greedy
from tools.demo.twin import Twin
from torch import Tensor

CHATS = (
    "Hello!", "Who are you?", "What is the capital of France?", "What is 12 + 7?",
    "Write a Python function that reverses a string.", "Count from 1 to 10.",
    "What is the opposite of hot?", "What is a river?", "Name three fruits.",
    "Tell me a short story about Anna.", "What comes after Monday?", "Is 17 even or odd?",
)  # fmt: skip
TEXTS = (
    "import os\nimport sys\n\n\nclass ", "def read_config(path):\n    ",
    "ROMEO\n", "The State of the Union is ", "This module provides ", "Call me Ishmael. ",
)  # fmt: skip
BAR = "\uff5c"


@torch.no_grad()
def heldout_loss(twin: Twin, batches: Batches, count: int, length: int) -> dict[str, float]:
    """Mean cross entropy (nats a token) of each source's held-out text."""
    result = {}
    for name in MIX:
        ids = batches.window(name, count, length)
        logits, _ = twin.logits(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        result[name] = round(loss.item(), 4)
    return result


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the chat prompts (thinking off, two with thinking on) and the texts."""
    ids = []
    for text in CHATS:
        chat = f"<{BAR}User{BAR}>{text}<{BAR}Assistant{BAR}></think>"
        ids.append([0, *tokenizer.encode(chat, add_special_tokens=False).ids])
    effort = (
        "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)"
    )
    for text in CHATS[2:4]:
        chat = f"<{BAR}System{BAR}>{effort}\n\n<{BAR}User{BAR}>{text}<{BAR}Assistant{BAR}><think>"
        ids.append([0, *tokenizer.encode(chat, add_special_tokens=False).ids])
    ids += [[0, *tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS]
    return ids


@torch.no_grad()
def generate(
    twin: Twin, rows: list[list[int]], count: int, temperature: float = 0.0
) -> list[list[int]]:
    """`count` new tokens for every prompt by whole forwards (no cache)."""
    w = twin.text["sliding_window"]
    lengths = torch.tensor([len(r) for r in rows], device=twin.device)
    total = -(-(int(lengths.max()) + count) // w) * w
    ids = torch.full((len(rows), total), 2, device=twin.device)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    at = torch.arange(len(rows), device=twin.device)
    random = torch.Generator(device=twin.device).manual_seed(1)
    for n in range(count):
        logits, _ = twin.logits(ids)
        row = logits[at, lengths + n - 1].float()
        if temperature > 0:
            noise = torch.empty_like(row).exponential_(generator=random)
            token = (torch.softmax(row / temperature, -1) / noise).argmax(-1)
        else:
            token = row.argmax(-1)
        ids[at, lengths + n] = token
    return [ids[i, : lengths[i] + count].tolist() for i in range(len(rows))]


def _rounds(row: list[int], drafts: Tensor, first: int) -> tuple[int, int, list[int]]:
    """Rounds, accepted drafts and accepted-by-slot counts of one greedy text from `first`."""
    stop = next((i for i in range(first, len(row)) if row[i] == 1), len(row) - 1)
    size = drafts.shape[1]
    rounds, accepted, by_slot = 0, 0, [0] * size
    p = first
    while p < stop - size:
        a = 0
        while a < size and int(drafts[p, a]) == row[p + 1 + a]:
            by_slot[a] += 1
            a += 1
        rounds, accepted, p = rounds + 1, accepted + a, p + a + 1
    return rounds, accepted, by_slot


@torch.no_grad()
def acceptance(twin: Twin, rows: list[list[int]], starts: list[int]) -> dict[str, object]:
    """Accepted drafts a round on greedy texts (rows of equal use; starts = prompt lengths)."""
    size = twin.text["dspark_block_size"]
    total_rounds, total, slots = 0, 0, [0] * size
    for row, first in zip(rows, starts, strict=True):
        ids = torch.tensor([row], device=twin.device)
        full = twin.padded(ids)
        _, state = twin.logits(full)
        where = torch.arange(1, len(row), device=twin.device)[None]
        drafts, _, _ = draft_greedy(twin, full, where, state)
        drafts = F.pad(drafts, (0, 0, 1, 0), value=-1).cpu()
        rounds, accepted, by_slot = _rounds(row, drafts, first)
        total_rounds, total = total_rounds + rounds, total + accepted
        slots = [a + b for a, b in zip(slots, by_slot, strict=True)]
    share = [round(s / max(total_rounds, 1), 3) for s in slots]
    return {
        "rounds": total_rounds,
        "accepted": round(total / max(total_rounds, 1), 3),
        "slots": share,
    }


def heldout_prompts(
    batches: Batches, name: str, count: int, length: int, end_id: int
) -> list[list[int]]:
    """Held-out beginnings: chats up to their first </think> (`end_id`), else `length` tokens."""
    if name != "chat":
        return [row[:length] for row in batches.window(name, count, length).tolist()]
    rows = batches.window(name, count, 250).tolist()
    return [row[: row.index(end_id) + 1] for row in rows if end_id in row]
