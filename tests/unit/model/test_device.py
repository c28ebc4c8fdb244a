"""What the `device` setting means on this machine."""

import pytest
import torch

from twinspark.config.engine import EngineConfig
from twinspark.errors import ConfigError
from twinspark.model import device as module
from twinspark.model.device import choose_device, device_kind, device_name, device_of_rank


@pytest.fixture
def machine(monkeypatch):
    """A machine with some CUDA devices, which our kernels run on unless there is a reason."""

    def make(count, reason=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(module, "why_not_launch", lambda device: reason)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    return make


def test_auto_takes_a_cuda_device_that_can_be_used(machine, caplog):
    machine(2)
    assert choose_device("auto") == torch.device("cuda", 0)
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    machine(0)
    assert choose_device("auto") == torch.device("cpu")
    assert not caplog.records
    machine(1, "it is too old")
    assert choose_device("auto") == torch.device("cpu")
    assert "it is too old" in caplog.text


@pytest.mark.parametrize(
    ("count", "reason", "wanted", "said"),
    [
        (0, None, "cuda", "finds no CUDA device"),
        (1, None, "cuda:1", "1 CUDA devices"),
        (1, "it is too old", "cuda", "it is too old"),
    ],
)
def test_a_named_device_that_cannot_be_used_is_refused(machine, count, reason, wanted, said):
    machine(count, reason)
    with pytest.raises(ConfigError, match=said):
        choose_device(wanted)


def test_ranks_take_a_device_each_from_the_first_on(machine):
    machine(3)
    assert choose_device("auto", ranks=2) == torch.device("cuda", 0)
    assert choose_device("cuda:1", ranks=2) == torch.device("cuda", 1)
    assert choose_device("cpu", ranks=2) == torch.device("cpu")
    first = torch.device("cuda", 1)
    assert [device_of_rank(first, rank) for rank in range(2)] == [first, torch.device("cuda", 2)]
    assert device_of_rank(torch.device("cpu"), 1) == torch.device("cpu")


def test_too_few_devices_for_the_ranks_are_named(machine, caplog):
    machine(2)
    with pytest.raises(ConfigError, match="2 ranks need a CUDA device each from 1 on, .* has 2"):
        choose_device("cuda:1", ranks=2)
    assert choose_device("auto", ranks=4) == torch.device("cpu")
    assert "4 ranks need a CUDA device each" in caplog.text


def test_ranks_on_devices_need_nccl(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert choose_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="no NCCL"):
        choose_device("cuda", ranks=2)


def test_equal_devices_are_of_one_kind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    kinds = {device_kind(torch.device("cuda", number)) for number in range(2)}
    assert kinds == {"NVIDIA H200, compute capability 9.0"}
    assert device_kind(torch.device("cpu")) == "cpu"


def test_the_cpu_has_no_name():
    assert device_name(torch.device("cpu")) == ""


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "", 0, None])
def test_settings_name_a_device(wanted):
    with pytest.raises(ConfigError, match="device is"):
        EngineConfig(device=wanted)
