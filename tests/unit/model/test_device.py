"""What the `device` setting means on this machine."""

import pytest
import torch

from twinspark.config.engine import EngineConfig
from twinspark.errors import ConfigError
from twinspark.model import device as module
from twinspark.model.device import choose_device, device_name


@pytest.fixture
def machine(monkeypatch):
    """A machine with some CUDA devices, which our kernels run on unless there is a reason."""

    def make(count, reason=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(module, "why_not_launch", lambda device: reason)

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


def test_several_ranks_run_on_cpus(machine):
    machine(2)
    assert choose_device("auto", ranks=2) == torch.device("cpu")
    with pytest.raises(ConfigError, match="several ranks"):
        choose_device("cuda", ranks=2)


def test_the_cpu_has_no_name():
    assert device_name(torch.device("cpu")) == ""


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "", 0, None])
def test_settings_name_a_device(wanted):
    with pytest.raises(ConfigError, match="device is"):
        EngineConfig(device=wanted)
