"""The quantize command: a whole small model, calibration text, refusals."""

import json

import pytest
from tests import tiny
from typer.testing import CliRunner

from twinspark.cli import main, quantize
from twinspark.cli.quantize import CALIBRATION_COLS, calibration_rows
from twinspark.errors import ConfigError, FormatError
from twinspark.kernels.exl3 import Codebook, Exl3Matrix
from twinspark.kernels.exl3.decode import pack_states
from twinspark.pack.reader import open_pack
from twinspark.quantize import pipeline
from twinspark.quantize.report import MatrixReport


@pytest.fixture
def quick_jobs(monkeypatch):
    """Stands in for the search, which needs most of an hour for TINY: zero words, right shapes."""
    import torch

    def run_jobs(jobs, options, *, on_progress):
        results = {}
        for job in jobs:
            inputs, outputs = job.weight_KN.shape
            states = torch.zeros(inputs // 16, outputs // 16, 256, dtype=torch.int32)
            matrix = Exl3Matrix(
                pack_states(states, 2 * job.bits),
                torch.ones(inputs).half(), torch.ones(outputs).half(), Codebook.MUL1,
            )  # fmt: skip
            report = MatrixReport(
                name=job.name, inputs=inputs, outputs=outputs, bits=job.bits,
                proxy_error=0.01, weight_nmse=0.02, seconds=0.0,
            )  # fmt: skip
            results[job.name] = (matrix, report)
        on_progress(1.0)
        return results

    monkeypatch.setattr(pipeline, "run_jobs", run_jobs)


def test_a_checkpoint_becomes_a_pack(quick_jobs, tmp_path):
    out, report = tmp_path / "pack", tmp_path / "report.json"
    arguments = ["quantize", str(tiny.plain_path()), str(out), "--bits", "3.2", "--head-bits", "5"]
    done = CliRunner().invoke(main.app, [*arguments, "--device", "cpu", "--report", str(report)])
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "" and "bits a weight" in done.stderr
    pack = open_pack(out)
    block = pack.config_json["quantization_config"]
    assert block["quant_method"] == "exl3" and block["head_bits"] == 5
    assert block["bits"] <= 3.2 and "calibration" not in block
    assert pack.info("head.trellis").shape[2] == 5 * 16
    found = json.loads(report.read_bytes())
    assert found["matrices"] == len(found["by_matrix"]) > 300
    again = CliRunner().invoke(main.app, arguments)
    assert isinstance(again.exception, FormatError) and "not an empty folder" in str(
        again.exception
    )


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="EXL3 matrix already"):
        quantize.quantize(tiny.exl3_path(), tmp_path / "a", bits=4.0, device="cpu")
    with pytest.raises(ConfigError, match="less than the least widths"):
        quantize.quantize(tiny.plain_path(), tmp_path / "b", bits=1.0, device="cpu")
    with pytest.raises(FormatError, match="does not exist"):
        quantize.quantize(tmp_path / "none", tmp_path / "c", bits=4.0, device="cpu")


def test_cuda_is_refused_where_there_is_none():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="no CUDA device"):
        quantize.choose_device("cuda")
    assert quantize.choose_device(None) == "cpu"


def test_calibration_rows_are_spread_and_begin_with_bos(small_tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word {i}" for i in range(3000)), encoding="utf-8")
    ids = small_tokenizer.encode_plain(text.read_text())
    found = calibration_rows(text, small_tokenizer, 4)
    assert len(found) == 4
    assert all(len(row) == CALIBRATION_COLS and row[0] == small_tokenizer.bos_id for row in found)
    assert found[0][1:] == ids[: CALIBRATION_COLS - 1]
    assert found[-1][1:] == ids[-(CALIBRATION_COLS - 1) :]
    text.write_text("short")
    with pytest.raises(ConfigError, match="expected at least"):
        calibration_rows(text, small_tokenizer, 4)
    text.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="text.txt"):
        calibration_rows(text, small_tokenizer, 4)
    with pytest.raises(ConfigError, match="none.txt"):
        calibration_rows(tmp_path / "none.txt", small_tokenizer, 4)
