"""Take the arrays that the model tests need out of the full golden file.

    python make_model_golden.py FULL.safetensors OUT.safetensors

The full file (11 MB) holds what DeepSeek's own code (DeepSeek-V4.1-Flash, inference/model.py, MIT)
computes on the TINY configuration with weights drawn from tensor names; see README.md here.
"""

import json
import re
import struct
import sys
from pathlib import Path

KEEP = [
    r"p\d+\.ids",
    r"f64\.p\d+\.(logits|decode_tokens|decode_logits|engram_rows)",
    r"f64\.p\d+\.(selected|candidate_blocks|select_margin|decode_selected)",
    r"f64\.p\d+\.draft_(ids|logits|confidence)",
    r"f64\.p33\.(compressed|index_key)\.\d+",
    r"f64\.p33\.(window|draft_context|taps|draft_base|streams|pre)",
    r"bf16\.p(17|33|80)\.(streams|pre)",
    r"f64_quirk\.p33\.decode_logits",
]


def main(source: str, target: str) -> None:
    data = Path(source).read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    kept, body, at = {}, [], 0
    for name, info in header.items():
        if not any(re.fullmatch(pattern, name) for pattern in KEEP):
            continue
        first, last = info["data_offsets"]
        body.append(data[8 + size + first : 8 + size + last])
        kept[name] = {**info, "data_offsets": [at, at + last - first]}
        at += last - first
    head = json.dumps(kept).encode()
    head += b" " * (-len(head) % 8)
    Path(target).write_bytes(struct.pack("<Q", len(head)) + head + b"".join(body))
    print(f"{len(kept)} arrays, {at} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
