"""Arguments of launches as the driver reads them; that kernels run is what the ops' tests show."""

import ctypes
import struct
from threading import Barrier, Thread

import torch

from twinspark.kernels.cuda.launch import Params, Pointer


def read(address: int, formats: str) -> list[int]:
    """What a driver finds: of each argument as many bytes as its type has."""
    addresses = (ctypes.c_uint64 * len(formats)).from_address(address)
    return [
        struct.unpack(kind, ctypes.string_at(at, struct.calcsize(kind)))[0]
        for kind, at in zip(formats, addresses, strict=True)
    ]


def test_every_kind_of_argument() -> None:
    x, params = torch.arange(4), Params()
    parameter = torch.nn.Parameter(torch.zeros(2))
    args = (x, Pointer((1 << 47) + 5), None, 7, -3, True, -(1 << 31), (1 << 31) - 1, parameter)
    for _ in range(2):
        assert read(params.put(args), "QQQiiiiiQ") == [
            x.data_ptr(), (1 << 47) + 5, 0, 7, -3, 1, -(1 << 31), (1 << 31) - 1,
            parameter.data_ptr(),
        ]  # fmt: skip
        assert read(params.put((5, x)), "iQ") == [5, x.data_ptr()]
        assert read(params.put(()), "") == []


def test_threads_do_not_see_each_other() -> None:
    params, barrier = Params(), Barrier(4)
    found: dict[int, list[int]] = {}

    def look(number: int) -> None:
        address = params.put((number, 10 * number))
        barrier.wait()  # all have put theirs
        found[number] = read(address, "ii")

    threads = [Thread(target=look, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number, 10 * number] for number in range(4)}
