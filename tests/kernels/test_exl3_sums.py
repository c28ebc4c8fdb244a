"""mul1 weights by tensor cores: constants of common.cuh, and where its fragments lead sums."""

import re
from pathlib import Path

import numpy as np

from twinspark.kernels import exl3
from twinspark.kernels.exl3 import Codebook, codebook_table

SOURCE = (Path(exl3.__file__).parent / "common.cuh").read_text("utf-8")


def body(name: str) -> str:
    """A function of the source, from its name to the next one."""
    start = SOURCE.index(f" {name}(")
    return SOURCE[start : SOURCE.index("\n}\n", start)]


def test_scale_and_offset_give_the_codebook() -> None:
    scale, offset = (
        np.uint16(int(half, 16)).view(np.float16).astype(np.float64)
        for half in re.findall(r'"r"\(0x(\w{4})\w{4}u\)', body("weights_of_sums"))
    )
    (word,) = re.findall(r"s\[i\] \*= 0x(\w+)u", body("decode_tile"))
    (pick,) = set(re.findall(r"\? 0x(\w+)u : 0u", body("places_of")))
    product = np.arange(65536, dtype=np.uint64) * np.uint64(int(word, 16)) & np.uint64(0xFFFFFFFF)
    columns = product.astype("<u4").view(np.uint8).reshape(65536, 4).astype(np.uint16)
    sums = columns @ np.frombuffer(bytes.fromhex(pick), np.uint8).astype(np.uint16)
    assert sums.max() < 2048  # below it fp16 numbers and their bits are proportional
    # the product has 22 bits: float64 adds exactly, and the one rounding is that of the instruction
    weights = (sums.view(np.float16).astype(np.float64) * scale + offset).astype(np.float16)
    table = codebook_table(Codebook.MUL1).numpy()
    assert np.array_equal(weights.view(np.uint16), table.view(np.uint16))


def test_sums_come_back_to_their_lane() -> None:
    """By the places of m16n8k32 fragments as the instruction set documents them."""
    order = [int(i) for i in re.findall(r'"r"\(product\[(\d)\]\)', body("add_bytes"))]
    (expression,) = re.findall(r"p\.picks\[i\] = (.*) \?", body("places_of"))
    words = np.random.default_rng(0).integers(0, 256, (32, 4, 4))  # lane, product, byte
    first, second = np.zeros((16, 32), int), np.zeros((32, 8), int)
    for lane in range(32):
        group, quad = lane >> 2, lane & 3
        for register, product in enumerate(order):
            row, column = group + 8 * (register & 1), 4 * quad + 16 * (register >> 1)
            first[row, column : column + 4] = words[lane, product]
        for i in range(2):
            if eval(expression, {"lane": lane, "i": i}):  # the same words in C
                second[4 * quad + 16 * i : 4 * quad + 16 * i + 4, group] = 2
    sums = first @ second
    for lane in range(32):
        group, quad = lane >> 2, lane & 3
        found = [sums[group + 8 * (i >> 1), 2 * quad + (i & 1)] for i in range(4)]
        assert found == [2 * int(words[lane, product].sum()) for product in range(4)]
