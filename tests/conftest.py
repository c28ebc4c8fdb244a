"""Fixtures that several folders share.

What the package keeps in the user's cache folder goes to a temporary one, child processes included.
"""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from tests.real_tokenizer import rebuild
from tests.small_tokenizer import small_tokenizer_json

from twinspark.text.tokenizer import Tokenizer

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts jobs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and tests press Ctrl-C

if "TEST_CACHE_HOME" in os.environ:  # so that several runs compile GPU kernels once
    os.environ["XDG_CACHE_HOME"] = os.environ["TEST_CACHE_HOME"]
else:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="twinspark-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# No test speaks TLS, and httpx reads all authorities again for each client, a fiftieth of a second.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.environ["XDG_CACHE_HOME"]


@pytest.fixture(scope="session")
def real_tokenizer_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tokenizer.json of DeepSeek-V4.1-Flash, rebuilt once into pytest's cache."""
    cache = getattr(request.config, "cache", None)
    return rebuild(cache.mkdir("tokenizer") if cache else tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def real_tokenizer(real_tokenizer_path: Path) -> Tokenizer:
    return Tokenizer.from_file(real_tokenizer_path)


@pytest.fixture(scope="session")
def small_tokenizer() -> Tokenizer:
    """A trained BPE of 360 tokens with the special tokens under other ids."""
    return Tokenizer(small_tokenizer_json())


@pytest.fixture(scope="session")
def tiny_model():
    """TINY with plain matrices, bf16 activations."""
    return _tiny("plain", "bfloat16")


@pytest.fixture(scope="session")
def tiny_model64():
    """TINY with plain matrices, everything in float64."""
    return _tiny("plain", "float64")


@pytest.fixture(scope="session")
def tiny_exl3_model():
    """TINY with EXL3 matrices of mixed widths, bf16 activations."""
    return _tiny("exl3", "bfloat16")


def _tiny(kind: str, dtype: str):
    import torch
    from tests import tiny
    from tests.unit.model.harness import tiny_token_map

    from twinspark.model.loading import load_model

    path = tiny.plain_path() if kind == "plain" else tiny.exl3_path()
    return load_model(path, dtype=getattr(torch, dtype), token_map=tiny_token_map())
