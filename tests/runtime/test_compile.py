"""Compiles, without a GPU, what the calls of tools/launched.py launch: no operand of wgmma is lost
(wrong code of ptxas, tools/wgmma_descriptors.py), nothing is spilled except what SPILLS allows, no
product of wgmma is serialized (ptxas's C7510 to C7519, which cost a third of the speed)."""

import dataclasses
import json
from pathlib import Path

import fresh
import pytest
from conftest import submodule
from interpreter import compiled

triton = pytest.importorskip("triton")
compile_all, known_code, launched, widest = (
    pytest.importorskip(name) for name in ("compile_all", "known_code", "launched", "widest")
)
tuning = submodule("runtime.tuning")

# Bytes a thread that may spill, by how a call's name begins and the kernel. The keys' gradient
# spills with 128 columns a step, and takes 0.03 ms of 0.31 less than with 64; the states' gradient
# takes 0.335 ms with two words and took 0.373 before it had what they hold (H200, Triton 3.6.0). At
# head dim 256 and in fp32, whose products are three each, accumulators fill the registers. Prepare
# with one value head a key head, and sizes that are no powers of two, hold more addresses. A
# program of <S, dS> (the gradient of beta) runs only where beta is next to nothing.
SPILLS = {
    ("swiglu forward, odd sizes", "_swiglu_fwd_kernel"): 8,
    ("experts training, odd sizes", "_up_kernel"): 8,
    ("experts fp8", "wide_kernel"): 16,
    ("experts training, odd sizes", "_gate_gradient_kernel"): 8,
    ("kda", "pairs_kernel"): 8,
    ("kda", "kda_prepare_fwd_kernel"): 64,  # what it needs again after its loops
    ("kda training", "_states_bwd_kernel"): 48,
    ("kda training", "_channels_bwd_kernel"): 456,
    ("kda training", "kda_channels_bwd_kernel"): 424,  # as it was when 748 us replaced 1141
    ("kda training", "_beta_bwd_kernel"): 16,
    ("kda training, fp32", "_states_bwd_kernel"): 2080,
    ("kda training, fp32", "_pairs_bwd_kernel"): 136,
    ("kda training, fp32", "_beta_bwd_kernel"): 400,
    ("kda prefill, pool", "_scan_kernel"): 96,  # with states on the way in its registers
    ("gdn", "_prepare_kernel"): 72,
    ("gdn training", "gdn_gradient_kernel"): 24,
    ("gdn training", "_beta_bwd_kernel"): 120,
    ("gdn training, head dim 256", "_states_bwd_kernel"): 16,
    ("gdn training, head dim 256", "_query_bwd_kernel"): 80,
    ("gdn training, head dim 256", "_key_bwd_kernel"): 168,
    ("gdn training, fp32", "_states_bwd_kernel"): 1720,
    ("gdn training, fp32", "_query_bwd_kernel"): 744,
    ("gdn training, fp32", "_key_bwd_kernel"): 1080,
    ("gdn training, fp32", "_beta_bwd_kernel"): 1920,
    ("gdn_layer convolution, gradient", "_causal_conv1d_bwd_kernel"): 272,
    ("rms_norm training, fp32", "_rms_norm_bwd_kernel"): 168,
    ("rms_norm training, 12288 columns", "_rms_norm_bwd_kernel"): 72,
    ("rms_norm training, 16384 columns", "_rms_norm_bwd_kernel"): 96,
    ("latent attention, GLM-4.7-Flash, ", "_ring_kernel"): 40,  # of several tokens
}
OTHERS = {"sm_80": 99, "sm_100": 227, "sm_120": 99}  # KiB of shared memory a program may have
SHARED_KERNELS = ("_scan_kernel", "_transition_kernel", "_states_bwd_kernel", "_query_bwd_kernel")
ON_OTHERS = (
    "gdn prefill, fp32, head dim 64",
    "gdn prefill, head dim 64, long",
    "gdn training, bf16",
)


MEASURED = "3.6."  # the Triton whose assembler SPILLS is of; others allocate registers differently


def check(report, most_shared: int) -> None:
    assert not report.error and not report.lost, report
    allowed = [
        most
        for (call, kernel), most in SPILLS.items()
        if report.kernel == kernel and report.call.startswith(call)
    ]
    spills = triton.__version__.startswith(MEASURED)
    assert not spills or report.spills <= max(allowed, default=0), report
    assert not report.serialized, report
    assert report.shared <= most_shared * 1024, report


KINDS = {name.partition(",")[0]: None for name in launched.CALLS}  # "gdn prefill"


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_hopper_code(kind):
    pairs = compile_all.kernels("sm_90", kind)
    assert pairs
    for report in known_code.reports_of(pairs, "sm_90"):
        check(report, 227)


@compiled
@pytest.mark.parametrize("chip", OTHERS)
def test_others_do_not_spill(chip):
    pairs = [
        (call, record)
        for call, record in compile_all.kernels(chip, *ON_OTHERS)
        if call in ON_OTHERS and record.name in SHARED_KERNELS
    ]
    assert {record.name for _, record in pairs} == {*SHARED_KERNELS}
    for report in known_code.reports_of(pairs, chip):
        check(report, OTHERS[chip])


# of all calls of tools/widest.py those that take the most shared memory, in which one takes more
# than sm_86 has if its tiles or its stages grow
TIGHT = [
    ("gdn training, float32, head dims 256 and 256", "_key_bwd_kernel"),
    ("gdn training, bfloat16, head dims 256 and 256", "_query_bwd_kernel"),
    ("attention decode, head dim 160, torch.bool", "_kvcache_attention_kernel"),
    ("projection, 33 tokens", "_project_few_kernel"),
]


@compiled
@pytest.mark.parametrize(
    "chip, call, kernel",
    [("sm_86", *case) for case in TIGHT]
    + [(chip, *case) for chip in ("sm_80", "sm_89", "sm_90") for case in TIGHT[2:]],
)
def test_widest_calls_fit(chip, call, kernel):
    pairs = [pair for pair in widest.launches(chip, call, kernel) if pair[0] == call]
    (report,) = known_code.reports_of(pairs, chip)
    assert not report.error and 32 * 1024 < report.shared <= widest.SHARED[chip]


def test_chips_before_hopper_have_the_same_settings():
    """So that what fits into the least shared memory, of sm_86 and sm_89, fits into all."""
    folder = tuning._CONFIGS
    operations = {path.stem.split(",")[0] for path in folder.glob("*.json")}
    assert len(operations) > 20
    for operation in operations:
        chips = [f"capability={minor}" for minor in ("8.0", "8.6", "8.9", "12.0")]
        (path,) = {tuning.path_of(operation, (chip,)) for chip in chips}
        assert path.name == f"{operation}.json"


@compiled
def test_equal_calls_are_compiled_once_and_chips_differ():
    hopper, ampere = (
        [(call, record.name) for call, record in compile_all.kernels(chip, "gdn prefill")]
        for chip in ("sm_90", "sm_80")
    )
    assert ("gdn prefill, equal lengths", "gdn_scan_fwd_kernel") in hopper
    assert ("gdn prefill, equal lengths", "_scan_kernel") in ampere
    again = [name for call, name in hopper if call == "gdn prefill, from states"]
    assert "gdn_prepare_fwd_kernel" not in again  # the call before it has it


@compiled
@pytest.mark.parametrize(
    "call, kernel",
    [
        ("gdn prefill, batch of 4", "gdn_scan_fwd_kernel"),
        ("rms_norm forward", "_rms_norm_fwd_kernel"),
    ],
)
def test_known_code_is_what_compiles(call, kernel):
    pairs = [pair for pair in compile_all.kernels("sm_90", call) if pair[1].name == kernel]
    found = compile_all.compile_one(call, "sm_90", pairs[0][1])
    check(found, 227)
    assert found.registers and (found.hgmma > 0) == ("gdn" in call)
    (known,) = known_code.reports_of(pairs[:1], "sm_90")
    assert (known.spills, known.shared) == (found.spills, found.shared)


@compiled
def test_what_is_changed_is_not_known(monkeypatch):
    """Each of what decides a kernel's code; but not the lines at which it stands."""
    record = compile_all.kernels("sm_90", "rms_norm forward")[0][1]
    (first,) = known_code.digests_of([record])
    others = [
        record._replace(options={**record.options, "num_warps": 16}),
        record._replace(target=dataclasses.replace(record.target, arch=100)),
        record._replace(signature={**record.signature, next(iter(record.signature)): "i64"}),
        record._replace(constexprs={**record.constexprs, (0,): 7}),
        record._replace(attributes={}),
    ]
    assert len({first, *known_code.digests_of(others)}) == 6
    monkeypatch.setattr(record.kernel, "starting_line_number", 1)
    monkeypatch.setattr(record.kernel, "hash", None)
    assert known_code.digests_of([record]) == [first]
    called = submodule("norm.portable.rms_norm")._added
    with monkeypatch.context() as patch:
        patch.setattr(called, "_src", called.src + "    0\n")
        assert known_code.digests_of([record]) != [first]
    monkeypatch.setattr(compile_all.triton, "__version__", "3.6.99")
    assert known_code.digests_of([record]) != [first]


TWICE = """
import sys
folder, *calls = sys.argv[1:]
sys.path.insert(0, folder)
import compile_all
for call in calls:
    sys.argv[1:] = ["--chip", "gfx942", "--call", call, "--json", call]
    assert compile_all.main() == 0
"""


@compiled
def test_amd(tmp_path):
    """For a chip that Triton compiles differently: SwiGLU and few tokens' products."""
    calls = ("swiglu forward, M 64", "projection")
    ran = fresh.python("-c", TWICE, Path(compile_all.__file__).parent, *calls, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    for call in calls:
        rows = json.loads((tmp_path / call).read_text())["rows"]
        assert rows and not [row for row in rows if row["error"] or row["spills"]]


@compiled
@pytest.mark.parametrize("chip", ["sm_90", *OTHERS])
def test_calls_in_fp8_on_every_chip(chip):
    """Those of the functions; without e4m3 they launch nothing, and nothing raises."""
    found = {call for call, _ in compile_all.kernels(chip, "fp8 ")}
    assert ("fp8 quantise" in found) == (chip != "sm_80")
    assert ("fp8 few, M 1, qkv" in found) == (chip == "sm_90")
