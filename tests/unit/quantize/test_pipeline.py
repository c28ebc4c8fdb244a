"""Calibration on TINY, the plan, and a pack with some matrices quantized."""

import numpy as np
import pytest
import torch
from tests import tiny

from twinspark.errors import ConfigError, FormatError
from twinspark.kernels.exl3 import dense_weight
from twinspark.model.loading import load_model
from twinspark.model.step import Span, StepInput
from twinspark.pack.check import Storage
from twinspark.pack.reader import open_pack
from twinspark.pack.weights import PackWeights
from twinspark.quantize.batch import run_jobs
from twinspark.quantize.calibrate import calibrate, input_name
from twinspark.quantize.convert import pack_tensors, plain_tensor
from twinspark.quantize.matrix import Job, QuantizeOptions
from twinspark.quantize.pipeline import (
    QuantizePlan,
    make_jobs,
    modules,
    plan_bits,
    write_quantized,
)

TEXTS = [tiny.prompt(70), tiny.prompt(45)]
TOKEN_MAP = np.array([tiny.token_map(i) for i in range(512)])


@pytest.fixture(scope="module")
def checkpoint():
    return open_pack(tiny.plain_path())


@pytest.fixture(scope="module")
def calibration(checkpoint):
    return calibrate(checkpoint, TEXTS, token_map=TOKEN_MAP)


@pytest.mark.parametrize(
    ("module", "leader"),
    [
        ("layers.3.attn.wkv", "layers.3.attn.wq_a"),
        ("layers.3.attn.compressor.wgate", "layers.3.attn.wq_a"),
        ("layers.3.attn.indexer.wq_b", "layers.3.attn.wq_b"),
        ("layers.3.attn.indexer.wk", "layers.3.attn.indexer.wk"),
        ("mtp.1.attn.wkv", "mtp.1.attn.wkv"),
        ("layers.3.ffn.experts.7.w3", "layers.3.ffn.experts.7.w1"),
        ("layers.1.engram.wkv", "layers.1.engram.wkv"),
        ("layers.3.attn.wo_a.slice.1", "layers.3.attn.wo_a.slice.1"),
    ],
)
def test_who_shares_an_input(module, leader):
    assert input_name(module) == leader


def test_every_matrix_has_a_hessian_of_its_width(checkpoint, calibration):
    for module in modules(checkpoint):
        hessian = calibration.of(module.name)
        if hessian is None:  # a draft expert that none of the few draft rows chose
            assert ".experts." in module.name and calibration.share(module.name) == 0
            continue
        assert hessian.moment_KK.shape == (module.inputs, module.inputs)
        assert torch.equal(hessian.moment_KK, hessian.moment_KK.T)
    assert calibration.tokens == 115 and calibration.sequences == 2


def test_rows_are_those_that_ran(checkpoint, calibration):
    c = checkpoint.config
    assert calibration.rows["layers.0.attn.wq_a"] == 115
    drafts = 3 * c.dspark_block_size  # after 32 and 64 rows of the first text, 32 of the second
    assert calibration.rows["mtp.1.attn.wq_a"] == drafts
    # a draft block's wkv also projects the context rows that stay in the ring
    assert calibration.rows["mtp.1.attn.wkv"] == 115 + drafts
    assert calibration.rows["head"] == 115 + drafts
    experts = [calibration.rows[f"layers.5.ffn.experts.{e}.w2"] for e in range(c.n_routed_experts)]
    assert sum(experts) == 115 * c.num_experts_per_tok
    shares = [calibration.share(f"layers.5.ffn.experts.{e}.w3") for e in range(c.n_routed_experts)]
    assert sum(shares) == pytest.approx(c.num_experts_per_tok)
    assert calibration.share("layers.5.attn.wo_b") == 1.0


def test_the_inputs_of_wq_a_are_the_normed_stream(checkpoint, calibration):
    """Layer 0's x is RMSNorm(embedding) * attn_norm, known without running the model."""
    weights = PackWeights(checkpoint)
    x = weights.plain("embed.weight", torch.float32)[torch.tensor([i for t in TEXTS for i in t])]
    x = x * x.square().mean(1, keepdim=True).rsqrt()
    x = (x * weights.plain("layers.0.attn_norm.weight", torch.float32)).bfloat16().float()
    expected = x.T @ x / len(x)
    found = calibration.of("layers.0.attn.wkv").moment_KK
    # single bf16 roundings may go the other way
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


def test_a_quantized_pack_cannot_be_calibrated():
    with pytest.raises(ConfigError, match="EXL3 matrix already"):
        calibrate(open_pack(tiny.exl3_path()), TEXTS, token_map=TOKEN_MAP)
    with pytest.raises(ConfigError, match="empty"):
        calibrate(open_pack(tiny.plain_path()), [[]], token_map=TOKEN_MAP)


def test_plan_keeps_budgets_bounds_and_pairs(checkpoint, calibration):
    plan = QuantizePlan(bits=3.5, mtp_bits=4.6, overrides={"layers.2.attn.wq_a": 6})
    widths = plan_bits(checkpoint, plan, calibration)
    known = {m.name: m for m in modules(checkpoint)}
    assert set(widths) == set(known)
    body = [m for n, m in known.items() if n != "head" and not n.startswith("mtp.")]
    weights = sum(m.inputs * m.outputs for m in body)
    spent = sum(m.inputs * m.outputs * widths[m.name] for m in body)
    step = max(m.inputs * m.outputs for m in body)
    assert 3.5 * weights - 2 * step < spent <= 3.5 * weights
    assert widths["head"] == 6 and widths["layers.2.attn.indexer.wk"] == 8
    assert widths["layers.2.attn.wq_a"] == 6
    for name in known:
        if name.endswith(".w1"):
            assert widths[name] == widths[name.replace(".w1", ".w3")]
        if "shared_experts" in name:
            assert widths[name] >= 5
    with pytest.raises(ConfigError, match="no matrix"):
        plan_bits(checkpoint, QuantizePlan(bits=4, overrides={"nobody": 4}), calibration)


def test_without_calibration_every_matrix_counts_alike(checkpoint):
    widths = plan_bits(checkpoint, QuantizePlan(bits=4.2), None)
    experts = {w for n, w in widths.items() if ".experts." in n and not n.startswith("mtp.")}
    assert len(experts) <= 2


def test_a_partly_quantized_pack_runs_and_is_near(checkpoint, calibration, tmp_path):
    widths = {m.name: 5 for m in modules(checkpoint)}
    chosen = {"layers.9.attn.wo_a.slice.0", "layers.9.attn.wo_a.slice.1"}
    jobs = [j for j in make_jobs(checkpoint, widths, calibration) if j.name in chosen]
    results = run_jobs(jobs, QuantizeOptions(sample_tiles=0))
    assert list(results) == [j.name for j in jobs] and len(results) == 2
    write_quantized(checkpoint, tmp_path / "pack", results, TEXTS)
    pack = open_pack(tmp_path / "pack")
    assert pack.linear_kind("layers.9.attn.wo_a") is Storage.EXL3_SLICES
    assert pack.linear_kind("layers.9.attn.wq_b") is Storage.PLAIN
    for name, (matrix, _) in results.items():
        read = PackWeights(pack).linear(name)
        assert torch.equal(read.trellis, matrix.trellis)
        assert torch.equal(dense_weight(read), dense_weight(matrix))
    block = pack.config_json["quantization_config"]
    assert block["quant_method"] == "exl3" and block["bits"] == 5.0
    assert block["calibration"] == {"rows": 2, "cols": 70}
    # TINY is chaotic in bf16: only the last layer's matrices are quantized here
    plain, packed = (logits(path) for path in (tiny.plain_path(), tmp_path / "pack"))
    assert float((plain - packed).norm() / plain.norm()) < 0.1
    assert not torch.equal(plain, packed)


def logits(path):
    model = load_model(path, token_map=TOKEN_MAP)
    caches = model.new_caches(1, 40)
    step = StepInput(
        spans=(Span(slot=0, first=0, count=32),),
        ids_T=list(TEXTS[0][:32]),
        history=((),),
        logit_rows=list(range(32)),
    )
    with torch.inference_mode():
        return model.forward(step, caches).logits_RV


def test_plain_tensors_keep_their_values_in_narrower_words(checkpoint):
    weights = PackWeights(checkpoint)
    for tensor in pack_tensors(checkpoint, {}):
        info = checkpoint.info(tensor.name)
        assert tensor.shape == info.shape
        if tensor.dtype != info.dtype:
            wanted = weights.plain(tensor.name, torch.float32).numpy()
            raw = np.frombuffer(tensor.data, "<u2")
            if tensor.dtype == "F16":
                got = raw.view("<f2").astype(np.float32)
            else:
                got = (raw.astype(np.uint32) << 16).view(np.float32)
            assert np.array_equal(got.reshape(wanted.shape), wanted)
    assert plain_tensor(checkpoint, "layers.0.ffn.gate.weight").dtype in ("F16", "BF16")
    assert plain_tensor(checkpoint, "layers.0.ffn.gate.bias").dtype == "F32"


def test_the_folder_must_be_empty(checkpoint, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError, match="not empty"):
        write_quantized(checkpoint, tmp_path, {}, ())


def test_batches_group_by_shape_and_width(checkpoint):
    done = []
    jobs = [
        Job("a", torch.randn(128, 128), None, 8),
        Job("b", torch.randn(128, 128), None, 7),
        Job("c", torch.zeros(128, 128), None, 8),
    ]
    results = run_jobs(jobs, QuantizeOptions(sample_tiles=0), on_progress=done.append)
    assert list(results) == ["a", "b", "c"]
    assert [results[n][0].bits for n in "abc"] == [8, 7, 8]
    assert done == [pytest.approx(2 / 3), 1.0]
