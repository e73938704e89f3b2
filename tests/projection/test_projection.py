"""Projections of a few tokens against the reference, and when they are used."""

import pytest
import torch
from conftest import assert_close, relative_error, submodule
from interpreter import compiled, interpreted, test_in_the_interpreter  # noqa: F401

reference, portable = submodule("projection.reference"), "projection.portable.project"
calls = submodule("projection.call")

# weights of Qwen3.5 (qkv, z, b, a), Qwen3-Next (two) and OLMo-Hybrid (six); rows past a tile
ROWS = [(96, 64, 4, 4), (130, 8), (64, 64, 96, 96, 4, 4)]


def inputs(M, K, rows, dtype, device):
    torch.manual_seed(M)
    x = torch.randn(M, K + 16, device=device, dtype=dtype)[:, :K]
    return x, [torch.randn(n, K, device=device, dtype=dtype) * K**-0.5 for n in rows]


def prepared(x, weights, activation=None):
    return submodule(portable).prepare_project_fwd(calls.products(x, weights, activation))


def product(x, weights, activation=None):
    """By the kernels."""
    call = calls.products(x, weights, activation)
    return prepared(x, weights, activation)(*call.tensors)


def right(x, weights, activation=None):
    return reference.project_fwd(x.double(), *[w.double() for w in weights], activation, False)


def check(dtype, device, monkeypatch):
    for rows in ROWS:
        for M in (1, 5, 16, 33, 64):
            x, weights = inputs(M, 192 if M < 16 else 128, rows, dtype, device)
            assert_close(product(x, weights), right(x, weights))
    for K, rows in ((64, 3), (192, 40), (1600, 70)):  # less than a tile, several, and a rest
        x, weights = inputs(1, K, (rows, rows), dtype, device)
        for activation in ("silu", "gelu_tanh", "relu"):
            z = product(x, weights, activation)
            assert_close(z, right(x, weights, activation))
            down = torch.randn(K, rows, device=device, dtype=dtype) * rows**-0.5
            call = calls.TokenMlp.of((x, *weights, down, activation))
            y = submodule(portable).prepare_token_mlp_fwd(call)(*call.tensors)
            assert_close(y, z.double() @ down.double().T)
    for K, rows in ((64, 3), (768, 70), (1536, 16)):
        x, (w,) = inputs(1, K, (rows,), dtype, device)
        norm = torch.randn(K, device=device, dtype=dtype)
        call = calls.NormedProject.of((x[None], norm, w, 1e-6))
        y = submodule(portable).prepare_normed_project_fwd(call)(*call.tensors)
        wide = (t.double() for t in call.tensors)
        assert_close(y, reference.normed_project_fwd(*wide, 1e-6))
    for K, rows, parts in ((64, 1, 1), (192, 70, 3), (448, 130, 3), (576, 64, 5)):
        monkeypatch.setattr(submodule(portable), "parts_of_k", lambda x, weight, parts=parts: parts)
        for M in (1, 5, 64):
            x, weights = inputs(M, K, (rows,), dtype, device)
            if M == 1 or parts > 1:
                assert_close(product(x, weights), right(x, weights))
                wide = calls.products(x, weights)._replace(options=calls.ProjectOptions(None, True))
                y = submodule(portable).prepare_project_fwd(wide)(*wide.tensors)
                assert y.dtype is torch.float32  # of products that are exact, in another order
                assert relative_error(y, right(x, weights)) < 1e-5
            else:
                assert prepared(x, weights) is None


@interpreted
def test_values_interpreted(monkeypatch):
    check(torch.float16, "cpu", monkeypatch)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype, monkeypatch):
    check(dtype, "cuda", monkeypatch)


@pytest.mark.gpu
@compiled
def test_parts_of_one_weight():
    """As many programs as the GPU has SMs; the same bits in every run."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for M, K, rows in ((2, 2048, 512), (64, 4096, 2560), (17, 9216, 2560), (64, 1024, 64)):
        x, weights = inputs(M, K, (rows,), torch.bfloat16, "cuda")
        parts = submodule(portable).parts_of_k(x, *weights)
        if not submodule("runtime.device").overlaps_launches(x.device):
            assert parts == 1
            continue
        assert parts == min(processors // -(-rows // 64), K // 512) > 1
        y = product(x, weights)
        assert_close(y, right(x, weights))
        assert all(torch.equal(y, product(x, weights)) for _ in range(3))
    x, weights = inputs(8, 4096, (16384,), torch.bfloat16, "cuda")
    assert prepared(x, weights) is None  # fills the GPU without


@compiled
def test_what_is_refused():
    """More tokens than a decoding batch, other dtypes, odd widths, weights that are not dense."""
    x, weights = inputs(4, 128, (96, 8), torch.bfloat16, "cpu")
    assert prepared(x, weights)
    assert not prepared(x.repeat(17, 1), weights)
    assert not prepared(x.float(), [w.float() for w in weights])
    assert not prepared(x[:, :100], [w[:, :100] for w in weights])
    assert not prepared(x, [w.t().contiguous().t() for w in weights])
    assert not prepared(x[:, :64], weights)  # of another width
    pair = [weights[0], weights[0]]
    assert prepared(x[:1], pair, "silu")
    assert not prepared(x, pair, "silu")  # a gate: of one token alone
    assert not prepared(x[:1], pair, "gelu")
    assert not prepared(x[:1], weights, "silu") and not prepared(x[:1], pair * 2, "silu")


@compiled
def test_without_a_kernel_the_modules_are_called(kernel):
    """On a CPU, with gradients and under autocast there is nothing to gain."""
    project = submodule("projection.project").project
    x, weights = inputs(4, 128, (96, 8), torch.bfloat16, "cpu")
    with torch.no_grad():
        assert project(x[None], weights) is None and project(x, weights * 4) is None


@compiled
def test_one_graph(kernel):
    """Tracing sees the operators where a chip has kernels."""
    pytest.importorskip("triton.experimental.gluon")
    recording, device = submodule("runtime.recording"), submodule("runtime.device")
    project = submodule("projection.project")
    x, (w, v) = inputs(1, 128, (96, 96), torch.bfloat16, "cpu")
    down = torch.empty(128, 128).bfloat16()

    def step(x, w, v):
        z = project.mlp_of_a_token(x, w, w.clone(), v.new_empty(128, 96), "silu")
        return project.project(x, [w, v]), project.project(x, [down]), z

    with torch.no_grad(), recording.recorded(device.Chip("NVIDIA_H200", (9, 0), 132)) as records:
        (a, b), (c,), z = torch.compile(step, backend="eager", fullgraph=True)(x, w, v)
    assert (a.shape, b.shape, c.shape, z.shape) == ((1, 96), (1, 96), (1, 128), (1, 128))
    names = [record.name for record in records]
    assert names.count("project_token_kernel") == 2 and names.count("gated_token_kernel") == 1


@pytest.mark.gpu
@compiled
def test_the_mlp_of_few_tokens(kernel):
    """Products without biases, as a decoding step has them; else what serves any MLP."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    dispatch, seen = submodule("runtime.dispatch"), {}
    for bias in (False, True):
        config = llama.LlamaConfig(hidden_size=256, intermediate_size=1088, mlp_bias=bias)
        mlp = llama.LlamaMLP(config).to("cuda", torch.bfloat16)
        exact = llama.LlamaMLP(config).to("cuda", torch.float64)
        exact.load_state_dict(mlp.state_dict())
        assert kernel.kernelize(mlp).served
        for rows in (1, 2, 65):
            x = torch.randn(1, rows, 256, device="cuda", dtype=torch.bfloat16)
            with torch.no_grad(), dispatch.served() as seen[bias, rows]:
                y = mlp(x)
            assert y.shape == x.shape
            with torch.no_grad():
                assert_close(y, mlp(x))  # by what is remembered of the call
                assert_close(y, exact(x.double()))
                assert_close(mlp(x[0, 0]), exact(x[0, 0].double()))  # [K]
    assert seen[False, 1].keys() == {"token_mlp_fwd"}
    if submodule("runtime.device").overlaps_launches(x.device):
        assert seen[False, 2].keys() == {"swiglu_fwd", "project_fwd"}
    few = ((False, 1), (False, 2))
    assert all("project_fwd" not in seen[key] for key in seen if key not in few)
