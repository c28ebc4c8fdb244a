"""Branches of a recording, with a driver that only notes what a stream depends on."""

from types import SimpleNamespace

import pytest
import torch

from twinspark.kernels.cuda import beside
from twinspark.kernels.cuda.beside import Branch


class Edge:
    def __init__(self, from_port=0, to_port=0, type=0):
        self.from_port, self.to_port, self.type = from_port, to_port, type


class Driver:
    """One stream; edges it gives lie in memory of its own until the next call."""

    CUgraphEdgeData = Edge
    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1
    CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
    CUstreamUpdateCaptureDependencies_flags = SimpleNamespace(
        CU_STREAM_ADD_CAPTURE_DEPENDENCIES=0, CU_STREAM_SET_CAPTURE_DEPENDENCIES=1
    )

    def __init__(self):
        self.deps = [("streams", (0, 0, 0))]
        self.nodes = {}
        self.given = []

    def CUstream(self, handle):
        return handle

    def _call(self):
        for edge in self.given:
            edge.from_port = edge.to_port = edge.type = 77

    def launch(self, name):
        self._call()
        self.nodes[name] = list(self.deps)
        self.deps = [(name, (0, 0, 0))]

    def cuStreamGetCaptureInfo(self, _stream):
        self._call()
        self.given = [Edge(*kind) for _, kind in self.deps]
        return 0, 1, 1, None, [name for name, _ in self.deps], self.given, len(self.deps)

    def cuStreamUpdateCaptureDependencies(self, _stream, nodes, edges, num, flags):
        self._call()
        edges = edges or [Edge()] * num
        found = [(n, (e.from_port, e.to_port, e.type)) for n, e in zip(nodes, edges, strict=True)]
        self.deps = found if flags == 1 else [*self.deps, *found]
        return (0,)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(beside, "import_module", lambda _name: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return made


def test_what_comes_after_a_branch_does_not_wait_for_it_until_it_is_joined(driver):
    branch = Branch(lambda: [driver.launch("mix a"), driver.launch("mix b")])
    driver.launch("attention")
    branch.join()
    branch.join()
    driver.launch("boundary")
    driver.launch("router")
    plain, early = (0, 0, 0), (1, 0, 1)
    assert driver.nodes == {
        "mix a": [("streams", plain)],
        "mix b": [("mix a", plain)],
        "attention": [("streams", plain)],
        "boundary": [("attention", plain), ("mix b", early)],
        "router": [("boundary", plain)],
    }


def test_after_the_recording_there_is_nothing_to_join(driver, monkeypatch):
    branch = Branch(lambda: driver.launch("mix"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    before = list(driver.deps)
    branch.join()
    assert driver.deps == before


def test_a_driver_that_refuses_says_so(driver, monkeypatch):
    class Refused(int):
        name = "CUDA_ERROR_ILLEGAL_STATE"

    monkeypatch.setattr(
        driver, "cuStreamUpdateCaptureDependencies", lambda *_: (Refused(401),), raising=False
    )
    with pytest.raises(RuntimeError, match="ILLEGAL_STATE"):
        Branch(lambda: driver.launch("mix"))
