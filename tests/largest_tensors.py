"""Watch what torch allocates: the largest tensor that any operation returns."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Context manager.

    Attributes:
        num_bytes: of the largest tensor made, views not counted.
        op: which operation made it.
    """

    def __init__(self):
        super().__init__()
        self.num_bytes, self.op = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        for tensor in tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in old and storage.nbytes() > self.num_bytes:
                self.num_bytes, self.op = storage.nbytes(), str(func)
        return out


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
