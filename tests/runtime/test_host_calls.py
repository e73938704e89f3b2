"""Host cost of a call: the number of Python functions that a repeated call runs, with Triton's own
binder and a stub of its launcher."""

import functools
import sys

import pytest
import torch
from conftest import submodule
from interpreter import compiled
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton.experimental.gluon")
from launching import Kernel, pretending  # noqa: E402

# Functions of a call, comprehensions apart. With a table of its own for each launcher they were 53,
# 8, 33, 29 and 10.
MOST = {
    "prefill": 32,
    "decode": 7,  # one of them lets autograd notice what was written
    "decode, 4 tokens": 8,  # 179 without a launch that is kept
    "decode without gates": 12,  # g and beta are made
    "replay": 8,  # here, too
    "ring": 7,  # here, too
    "ring to states": 8,
    "swiglu, M=1": 9,
    "swiglu, M=512": 12,
    "layer": 7,  # here, too
    "convolution": 6,  # by checks and tables of launches they were 31
    "convolution, gradient": 52,  # 144 so
    "convolution of a token": 8,  # 38 so; one of them lets autograd notice what was written
    "norm": 9,
    "gated norm": 6,  # 37 so
    "gated norm, gradient": 49,  # 151 so
    "gate": 9,
    "norm in FP8": 6,
    "products in FP8": 7,
    "experts in FP8, T=4": 16,
    "rotary and cache": 7,  # here, too
    "attention gate": 7,
    "static cache": 8,
    # 659 by torch.library and without plans; three are for a gradient in two parts, of which the
    # first needs nothing of other ranks
    "rule, training step": 84,
    "kda prefill": 32,
    "kda decode": 7,
    "kda training step": 667,  # 1078 with a launcher, a plan and an operator of each form
    "experts, T=1": 11,
    "experts, T=100": 60,
    "experts, training step": 173,  # 274 by a Function of its own and without plans
    "router, training step": 45,  # 124 by torch.library and without plans
    # 19 of each are torch.autograd.grad's
    "norm, training step": 49,
    "gate, training step": 46,
    "rotary, training step": 60,
    "MLP, training step": 110,
}


@pytest.fixture
def hopper(kernel, monkeypatch):
    """CPU tensors are taken to be on a Hopper GPU; kernels are found and never run."""
    from triton.runtime.jit import JITFunction

    device, dispatch = submodule("runtime.device"), submodule("runtime.dispatch")
    kernels = {}

    def run(self, *args, grid, warmup, **options):
        one = kernels.setdefault(id(self), Kernel(self))
        return one[grid](*args, **options)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(device, "pretended", device.Chip("NVIDIA_H200", (9, 0), 132))
    forget = submodule("runtime.device").forget
    forget()
    with pretending(monkeypatch):
        yield kernel
    monkeypatch.undo()
    forget()
    dispatch._folders.cache_clear()


# What stands for Triton's launcher; and tensor maps (Launch._mapped), which are encoded where an
# output lies where none lay before.
APART = ("launching.py", "maps.py", "code.py", "<string>")


def once(call, apart=APART) -> int:
    """Functions of the package and of torch that run in one call."""
    names = []

    def count(frame, event, _):
        code = frame.f_code
        if event == "call" and "comp>" not in code.co_name:
            if not code.co_filename.endswith(apart) and code.co_name != "_mapped":
                names.append(code.co_name)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(names) - 1


def functions(call) -> int:
    """Those of a repeated call: the fewest, since outputs may lie where none lay before."""
    return min(once(call) for _ in range(30))


def tensors(T: int, H: int = 2, HV: int = 4, D: int = 128):
    shapes = ((H, D), (H, D), (HV, D), (HV,), (HV,))
    dtypes = (torch.bfloat16,) * 3 + (torch.float32,) * 2
    return [torch.zeros(1, T, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]


def channel_tensors(T: int) -> list:
    """The same for Kimi Delta Attention."""
    q, k, v, _, beta = tensors(T, H=4)
    return [q, k, v, torch.zeros(1, T, 4, 128), beta]


def experts_of(T: int) -> list:
    """x, both weights, ids and weights of the slots."""
    shapes = (T, 64), (16, 64, 64), (16, 64, 32), (T, 4)
    x, w_gate_up, w_down, weights = (torch.zeros(s, dtype=torch.bfloat16) for s in shapes)
    return [x, w_gate_up, w_down, torch.zeros(T, 4, dtype=torch.int64), weights]


def step(function, leaves: list) -> None:
    """A call and its gradient for those of the leaves that have one."""
    with torch.enable_grad():
        y = function(*leaves)
        y = y[0] if isinstance(y, tuple) else y
        torch.autograd.grad(y, [x for x in leaves if x.requires_grad], torch.empty_like(y))


def trained(*tensors: torch.Tensor) -> list:
    return [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]


def steps(kernel) -> dict:
    """Training steps of what surrounds attention in a layer of a small model."""
    tokens, wide = torch.zeros(2, 1, 512, 64).bfloat16()[0], torch.zeros(512, 128).bfloat16()
    weight, weights = torch.zeros(64).bfloat16(), torch.zeros(2, 128, 64).bfloat16()
    heads, table = torch.zeros(2, 1, 512, 2, 64).bfloat16(), torch.zeros(1, 512, 64).bfloat16()
    cos, sin = table, table.clone()
    return {
        "norm, training step": functools.partial(step, kernel.rms_norm, trained(tokens, weight)),
        "gate, training step": functools.partial(step, kernel.silu_mul, trained(wide, wide)),
        "rotary, training step": functools.partial(
            step, lambda q, k: kernel.fused_qk_norm_rope(q, k, cos, sin)[0], trained(*heads)
        ),
        "MLP, training step": functools.partial(
            step, kernel.fused_swiglu_mlp, trained(tokens, *weights, weights[0].mT.contiguous())
        ),
    }


def layer_calls(kernel) -> dict:
    """Parts of a GDN layer."""
    x, weight = torch.zeros(1, 64, 256).bfloat16().mT, torch.zeros(256, 4).bfloat16()
    token, state = torch.zeros(2, 256).bfloat16(), torch.zeros(2, 256, 4).bfloat16()
    heads = (*torch.zeros(2, 8, 4, 128).bfloat16(), torch.zeros(128).bfloat16())
    convolve = functools.partial(kernel.causal_conv1d_fn, activation="silu")
    leaves, parts = trained(x, weight), trained(*heads)
    return {
        "convolution": lambda: convolve(x, weight),
        "convolution, gradient": lambda: step(convolve, leaves),
        "convolution of a token": lambda: kernel.causal_conv1d_update(token, state, weight),
        "gated norm": lambda: kernel.rms_norm_gated(*heads),
        "gated norm, gradient": lambda: step(kernel.rms_norm_gated, parts),
    }


def fp8_calls() -> dict:
    ops, experts = submodule("fp8.ops"), submodule("experts.ops_fp8").fp8_experts
    x, residual, weight = (torch.zeros(*s, 512).bfloat16() for s in ((4,), (4,), ()))
    weights = [torch.zeros(512, 512).to(torch.float8_e4m3fn) for _ in range(2)]
    weights = [(weight, torch.ones(4, 4), None) for weight in weights]
    codes = submodule("fp8.reference").quantise_fwd(x)
    stacked = [torch.zeros(4, *s, 256).to(torch.float8_e4m3fn) for s in ((512,), (256,))]
    tensors = (stacked[0], torch.ones(4, 4, 2), stacked[1], torch.ones(4, 2, 2))
    routed = (torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2).bfloat16())
    token = x[:, :256].contiguous()
    return {
        "norm in FP8": lambda: ops.NORM_QUANTISE((x, weight, residual), (1e-6, "llama", 0.0)),
        "products in FP8": lambda: ops.products((4,), weights, None, codes),
        "experts in FP8, T=4": lambda: experts(token, *tensors, *routed),
    }


def calls(kernel) -> dict:
    w_gate, w_up = torch.zeros(128, 64, dtype=torch.bfloat16).chunk(2)
    few, many = (torch.zeros(M, 64, dtype=torch.bfloat16) for M in (1, 512))
    prompt, token = tensors(64), tensors(1)
    state = torch.zeros(1, 4, 128, 128)
    q, k, v, *_ = token
    a, b = (torch.zeros(1, 1, 4, dtype=torch.bfloat16) for _ in range(2))
    held, weight = torch.zeros(2, 1, 1024, 4, dtype=torch.bfloat16)
    layer = (
        q, k, v, v.clone(), a, b, held, state, weight[0], None, torch.zeros(4),
        torch.zeros(4), torch.zeros(128, dtype=torch.bfloat16),
    )  # fmt: skip
    norm = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    decode = submodule("gdn_layer.ops_fused").DECODE
    heads, table = torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 64)
    heads, keys, values = (x.bfloat16() for x in (heads, *torch.zeros(2, 1, 2, 640, 64)))
    at = torch.tensor(3)
    cache = {"key_cache": keys, "value_cache": values, "cache_position": at}
    channels, channel = channel_tensors(64), channel_tensors(1)
    experts, logits = experts_of(100), torch.zeros(4, 32, dtype=torch.bfloat16)

    def training_step(rule, *tensors, **options):
        return functools.partial(step, functools.partial(rule, **options), trained(*tensors))

    l2norm = {"use_qk_l2norm_in_kernel": True}
    ring, cursor = kernel.make_ring(state, 2, torch.bfloat16), torch.zeros(1, 2, dtype=torch.int32)
    return {
        **layer_calls(kernel),
        **steps(kernel),
        **fp8_calls(),
        "decode, 4 tokens": functools.partial(
            kernel.fused_recurrent_gated_delta_rule, *tensors(4), output_final_state=True
        ),
        "decode without gates": lambda: kernel.fused_recurrent_gated_delta_rule(q, k, v),
        "replay": lambda: kernel.replay_gated_delta_rule(*token, state, ring, cursor),
        "ring": lambda: kernel.advance_ring(cursor, ring),
        "ring to states": lambda: kernel.materialise_ring(state, ring, cursor),
        "experts, T=1": functools.partial(kernel.fused_experts, *experts_of(1)),
        "experts, T=100": functools.partial(kernel.fused_experts, *experts),
        "experts, training step": training_step(kernel.fused_experts, *experts),
        "router, training step": training_step(kernel.fused_topk, logits, top_k=4),
        "rotary and cache": lambda: kernel.fused_qk_norm_rope(
            heads, heads.detach(), table, table.detach(), v=heads.detach(), **cache
        ),
        "attention gate": lambda: kernel.sigmoid_gate(heads, values[:, :1, :2]),
        "static cache": lambda: kernel.attention_with_kvcache(heads, keys, values, at),
        "prefill": lambda: kernel.chunk_gated_delta_rule(*prompt, initial_state=state, **norm),
        "decode": lambda: kernel.fused_recurrent_gated_delta_rule(
            *token, initial_state=state, inplace_final_state=True, **norm
        ),
        "swiglu, M=1": lambda: kernel.fused_swiglu(few, w_gate, w_up),
        "swiglu, M=512": lambda: kernel.fused_swiglu(many, w_gate, w_up),
        "layer": lambda: decode(layer, ("silu", 1e-6, "silu", False)),
        "norm": lambda: kernel.rms_norm(few, w_gate[0], residual=few),
        "gate": lambda: kernel.silu_mul(few, few),
        "rule, training step": training_step(kernel.chunk_gated_delta_rule, *prompt, **l2norm),
        "kda prefill": lambda: kernel.chunk_kda(*channels, initial_state=state, **norm),
        "kda decode": lambda: kernel.fused_recurrent_kda(
            *channel, initial_state=state, inplace_final_state=True, **norm
        ),
        "kda training step": training_step(kernel.chunk_kda, *channels, **l2norm),
    }


@compiled
@pytest.mark.parametrize("name", MOST)
def test_functions_of_a_call(hopper, name):
    with torch.no_grad():
        call = calls(hopper)[name]
        found = functions(call)
    assert 2 < found <= MOST[name]


@compiled
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_functions_of_a_rank(hopper, monkeypatch, rank):
    """Those of one of four processes that share a sequence; torch's group sends nothing."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist, exchange = torch.distributed, submodule("parallel.exchange")
    monkeypatch.setattr(exchange, "agrees", lambda group: False)
    dist.init_process_group("fake", rank=rank, world_size=4, store=fake_pg.FakeStore())
    try:
        cp = hopper.build_cp_context([0, 1024])
        options = {"use_qk_l2norm_in_kernel": True, "cp_context": cp}
        rule = functools.partial(hopper.chunk_gated_delta_rule, **options)
        convolve = functools.partial(hopper.causal_conv1d_fn, activation="silu", cp_context=cp)
        prompt, leaves = tensors(256), trained(*tensors(256))
        channels = trained(torch.zeros(1, 256, 256).bfloat16().mT, torch.zeros(256, 4).bfloat16())
        calls = {
            "rule": lambda: rule(*prompt), "rule, step": lambda: step(rule, leaves),
            "convolution, step": lambda: step(convolve, channels),
        }  # fmt: skip
        most = {"rule": 54, "rule, step": 182, "convolution, step": 100}
        with torch.no_grad():
            found = {name: functions(call) for name, call in calls.items()}
        assert all(20 < found[name] <= most[name] for name in most), found
        with FlopCounterMode(display=False):  # which torch's operators would see
            for call in calls.values():
                call()
    finally:
        dist.destroy_process_group()


@compiled
def test_plans_do_not_serve_what_is_only_pretended(hopper):
    """A plan would launch; under FakeTensorMode the operators say what shapes come out."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves = [x.requires_grad_() for x in tensors(64)]
    for _ in range(2):  # the second by the plan of the first
        hopper.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        o, _ = hopper.chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
    assert isinstance(o, FakeTensor) and o.shape == leaves[2].shape


def test_other_dtypes_by_other_code(hopper):
    """Calls of equal sizes that a plan serves: Triton's binder comes to the code of each."""
    x, weight = torch.zeros(2, 64), torch.zeros(64)
    with torch.no_grad(), submodule("runtime.launch").paranoid():
        for dtype in (torch.float32, torch.bfloat16, torch.float16) * 3:
            for added in (None, x.to(dtype)):
                y = hopper.rms_norm(x.to(dtype), weight, residual=added)
                y = y if added is None else y[0]
                assert y.dtype == torch.float32
                hopper.rms_norm(x.to(dtype), weight.to(dtype), residual=added)
            hopper.silu_mul(x.to(dtype), x.to(dtype))


def launches(call) -> list:
    """The kernels of a repeated call."""
    found = []
    call()
    with submodule("runtime.launch").watched(lambda one, _: found.append(one.kernel.__name__)):
        call()
    return found


def forget_other_models(monkeypatch) -> None:
    """No model in FP8 and no adapters were met by this process."""
    for room in ("layers.fp8.weights", "layers.lora"):
        for kind in list(forms := submodule(room).FORMS):
            monkeypatch.delitem(forms, kind)


def functions_of_a_layer(model, D: int, B: int = 1, rotary: float = 1.0, count=functions):
    """Those of a token of B sequences through the second layer of a kernelized model, on a static
    cache."""
    transformers = pytest.importorskip("transformers")
    from tiny_models import cache_name

    layer, cache = model.model.layers[1], transformers.StaticCache(model.config, max_cache_len=64)
    heads = model.config.num_key_value_heads
    x = torch.zeros(B, 1, model.config.hidden_size, dtype=torch.bfloat16)
    tables = torch.zeros(2, B, 1, int(D * rotary), dtype=torch.bfloat16)
    given = {
        "attention_mask": torch.ones(B, 1, 1, 64, dtype=torch.bool),
        "position_embeddings": tables.unbind(),
        cache_name(): cache,
    }
    with torch.no_grad():
        cache.layers[1].update(*torch.zeros(2, B, heads, 1, D, dtype=torch.bfloat16))
        return count(lambda: cache.layers[1].cumulative_length.zero_() is layer(x, **given))


@pytest.mark.parametrize("name, most", [("llama", 95), ("qwen3_5_text", 112)])
def test_functions_of_a_decoder_layer(hopper, monkeypatch, name, most):
    """A token through attention and MLP, on a static cache; torch's and transformers' own among
    them."""
    pytest.importorskip("transformers")
    from tiny_models import random_model

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    model = random_model(name, **sizes).bfloat16()
    forget_other_models(monkeypatch)
    hopper.kernelize(model)
    assert 50 < functions_of_a_layer(model, 64) <= most


def test_functions_of_a_kimi_delta_attention_layer(hopper):
    """A token after a prompt. They are 152 where q, k and v are a product of their own."""
    pytest.importorskip("transformers.models.kimi_linear")
    from tiny_models import random_model
    from transformers import DynamicCache

    sizes = {"hidden_size": 64, "linear_head_dim": 64}  # that kernels take
    model = random_model("kimi_linear", **sizes).bfloat16().eval()
    hopper.kernelize(model)
    layer = next(x for x in model.modules() if hasattr(x, "forget_gate"))
    cache = DynamicCache(config=model.config)
    x = torch.randn(1, 5, model.config.hidden_size, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x, cache, None)
        assert 100 < functions(lambda: layer(x[:, :1], cache, None)) <= 145


@pytest.mark.parametrize("name, most", [("tiny_qwen3", 124), ("tiny_qwen3_5", 134)])
def test_functions_of_a_layer_in_fp8(hopper, monkeypatch, name, most):
    """182 where weights were looked at one by one, and x quantised apart from its product. Of
    several sequences hardly more than in bf16, where one has products of its own; attention over a
    cache, or a gate behind it, saves the launch that quantises for the output projection. Where
    scales lie behind their codes, two functions make their address, for less than an allocation."""
    pytest.importorskip("transformers.integrations.finegrained_fp8")
    import fp8_problems

    fp8_problems.stand_in(monkeypatch)
    monkeypatch.setattr(submodule("fp8.hopper.multiply"), "_has_product", lambda *where: True)
    found, made, rotary = [], [], 1.0 if name == "tiny_qwen3" else 0.25
    parts = [f"{part}_proj" for part in ("gate", "up", "down", "q", "k", "v", "o", "out")]
    bf16 = ("lm_head", *parts, *(f"in_proj_{part}" for part in ("qkv", "z", "a", "b")))
    for skip in ({}, {"skip": bf16}):
        model = getattr(fp8_problems, name)(intermediate_size=9216, **skip)
        assert any(hasattr(x, "weight_scale_inv") for x in model.modules()) is not bool(skip)
        assert not hopper.kernelize(model).left
        found += [functions_of_a_layer(model, 128, B, rotary) for B in (1, 16)]
        made.append(functions_of_a_layer(model, 128, 16, rotary, launches))
    assert 100 < found[0] <= most
    assert found[1] <= 1.07 * found[3], found
    assert len(made[0]) == (10 if name == "tiny_qwen3" else 11)
    assert "_quantise_kernel" not in made[0]


def test_functions_of_an_mlp_in_shards(hopper, tmp_path):
    """A token of an MLP under transformers' tensor parallelism, which runs 123 by itself: shards
    are found again by the identity of forwards and parameters."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    from tiny_models import random_model
    from two_processes import in_shards

    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
        model = random_model("llama", **sizes).bfloat16().eval()
        mlp = in_shards(model, mesh).model.layers[0].mlp
        x = torch.zeros(1, 1, 256, dtype=torch.bfloat16)
        with torch.no_grad():
            theirs = functions(lambda: mlp(x))
            hopper.kernelize(model)
            assert 20 < functions(lambda: mlp(x)) <= min(32, theirs)
            assert launches(lambda: mlp(x)) == ["_swiglu_fwd_kernel", "project_token_kernel"]
    finally:
        dist.destroy_process_group()


def test_functions_of_kernelize(hopper):
    """Those of a process's first tiny Llama and of a second one: with comprehensions 14,800 and
    4,400 where trials made stubs and numbers anew for each run and each question."""
    pytest.importorskip("transformers")
    from tiny_models import random_model

    hopper.kernelize(random_model("llama"))  # what torch and transformers import late
    submodule("models.trust")._codes.clear()
    submodule("models.trial")._found.clear()
    submodule("models.attention_trial")._forms.clear()
    for most in (4300, 1010):
        model = random_model("llama")
        reports = []
        found = once(lambda model=model, to=reports: to.append(hopper.kernelize(model)), apart=())
        assert 500 < found <= most
        assert len(reports[0].served) == 12 and not reports[0].left
