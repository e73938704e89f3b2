"""Quantised modules of others: each is named in the report and left alone."""

import pytest
import torch
from conftest import submodule

CLASSES = {
    ("awq.modules.linear.gemm", "WQLinear_GEMM"): "int4 by AWQ",
    ("gptqmodel.nn_modules.qlinear.gemm_awq", "AwqGEMMQuantLinear"): "int4 by AWQ",
    ("gptqmodel.nn_modules.qlinear.marlin", "MarlinQuantLinear"): "int4 by GPTQ",
    ("auto_gptq.nn_modules.qlinear.qlinear_cuda", "QuantLinear"): "int4 by GPTQ",
    ("bitsandbytes.nn.modules", "Linear4bit"): "4 bits by bitsandbytes",
    ("bitsandbytes.nn.modules", "Linear8bitLt"): "int8 by bitsandbytes",
    ("auto_round_extension.triton.qlinear_tritonv2", "QuantLinear"): "int4 by AutoRound",
    ("hqq.core.quantize", "HQQLinear"): "a few bits by HQQ",
    ("optimum.quanto.nn.qlinear", "QLinear"): "a few bits by Quanto",
    ("aqlm.inference", "QuantizedLinear"): "codebooks by AQLM",
    ("vptq.layers.vqlinear", "VQuantLinear"): "codebooks by VPTQ",
    ("spqr_quant.inference", "QuantizedLinear"): "outliers by SpQR",
    ("fp_quant.module.linear", "FPQuantLinear"): "FP4 by FP-Quant",
    ("fouroversix.nn.linear", "FourOverSixLinear"): "FP4 by Four Over Six",
    ("sinq.sinqlinear_hf", "SINQLinear"): "4 bits by SINQ",
    ("quark.torch.quantization.nn.modules.quantize_linear", "QParamsLinear"): "by Quark",
    ("compressed_tensors.linear.compressed_linear", "CompressedLinear"): "by compressed-tensors",
    ("transformers.integrations.fbgemm_fp8", "FbgemmFp8Linear"): "FP8 by FBGEMM",
    ("transformers.integrations.mxfp4", "Mxfp4GptOssExperts"): "MXFP4: load with dequantize=True",
}


@pytest.mark.parametrize("name", CLASSES, ids=lambda name: name[1])
def test_a_format_is_named(kernel, name):
    kind = type(name[1], (torch.nn.Module,), {"__module__": name[0]})
    report = kernel.kernelize(torch.nn.ModuleDict({"part": kind()}))
    (row,) = report.rows
    assert row.module == "part" and row.kind == name[1] and CLASSES[name] in row.reason
    assert not row.unknown and not report.served and CLASSES[name] in str(report)


def test_others_have_no_row(kernel):
    format_of = submodule("models.formats").format_of
    for kind in (torch.nn.Linear, torch.nn.Embedding, torch.nn.Sequential):
        assert format_of(kind) is None
    assert not kernel.kernelize(torch.nn.Sequential(torch.nn.Linear(2, 2))).rows


def test_a_model_with_parts_of_another_format(kernel):
    """The MLP itself says what its parts are; the rest is looked at as ever."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=64))
    members = {"__module__": "bitsandbytes.nn.modules"}
    mlp.up_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), members)
    rows = {row.kind: row.reason for row in kernel.kernelize(mlp).rows}
    assert "Linear4bit" in rows and "4 bits by bitsandbytes" in rows["Linear4bit"]
    assert kernel.kernelize(mlp, only=["mlp"]).rows[-1].kind == "LlamaMLP"


HAS = {  # classes of the installed transformers, by their modules
    "mxfp4": ("Mxfp4GptOssExperts", "MXFP4: load with dequantize=True"),
    "fbgemm_fp8": ("FbgemmFp8Linear", "FBGEMM"),
    "compressed_tensors": ("CompressedTensorsFP8Linear", "FP8 by compressed-tensors"),
    "eetq": ("EetqLinear", "int8 by EETQ"),
    "bitnet": ("BitLinear", "BitNet"),
    "higgs": ("HiggsLinear", "HIGGS"),
    "nvfp4": ("NVFP4Linear", "NVFP4"),
    "metal_quantization": ("MetalLinear", "Metal"),
    "gemma_quant": ("QuantizedLinear", "Gemma"),
}


@pytest.mark.parametrize("name", HAS)
def test_transformers_has_these_classes(name):
    home = pytest.importorskip(f"transformers.integrations.{name}")
    kind, words = HAS[name]
    assert words in submodule("models.formats").format_of(getattr(home, kind)).reason


def test_what_to_do_is_said(kernel):
    """Of each format: which checkpoint to load."""
    said, formats = submodule("models.report").advice_for, submodule("models.formats").FORMATS
    for known in formats:
        assert "dequantize=True" in said(known.reason) or "bfloat16" in said(known.reason)
    assert "bfloat16" in said("gate_proj has a weight that is a Float8Tensor")
    assert "parallel" in said("gate_proj has a weight that is a DTensor")
