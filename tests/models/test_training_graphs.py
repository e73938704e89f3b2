"""Layers that train by CUDA graphs: what they give is what they gave, to the bit.

On a CPU graphs are emulated (emulated_graph.py).
"""

import contextlib
import copy
import gc
import threading

import pytest
import torch
from conftest import submodule
from decoding import WIDER, Counted, device, on_every_device  # noqa: F401
from emulated_graph import EmulatedGraph
from tiny_models import random_model, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
pytestmark = [on_every_device, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def attention(device):  # noqa: F811
    """cuDNN and FlashAttention add the parts of the queries' gradients in any order."""
    with contextlib.nullcontext() if device == "cpu" else sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(autouse=True)
def graph(device, monkeypatch):  # noqa: F811
    """The class of graphs, with .captures and .replays."""
    import weakref

    real = submodule("decoding.capture").Graph if device == "cuda" else EmulatedGraph
    facts = {"captures": 0, "replays": 0, "alive": weakref.WeakSet()}
    counted = type("Graph", (Counted, real), facts)
    for module in ("layer_step", "training_graphs"):
        monkeypatch.setattr(submodule(f"models.{module}"), "Graph", counted)
    submodule("models.serving").say_once.cache_clear()
    return counted


def pair(kernel, device, name="llama", dtype=None, adapt=lambda model: model, **changes):  # noqa: F811
    """The same model twice, kernelized without graphs and with them."""
    wide = WIDER if device == "cuda" else {}
    model = random_model(name, device, **{**wide, **changes})
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    eager = adapt(model.to(dtype)).train()
    graphed = copy.deepcopy(eager)
    kernel.kernelize(eager)
    report = kernel.kernelize(graphed, training_graphs=True)
    assert any(row.layer == "training" for row in report.rows)
    return eager, graphed


def lora(model, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options
    )  # fmt: skip
    model = peft.get_peft_model(model, config)
    for n, p in model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p, std=0.05)
    return model


def batch(model, rows=2, length=9, seed=0):
    where = next(model.parameters()).device
    return tokens(rows, length * (8 if where.type == "cuda" else 1), seed=seed).to(where)


def step(model, ids, optimizer=None, use_cache=False, **more):
    """(loss, gradients) of a step."""
    found = backward(model, model(input_ids=ids, labels=ids, use_cache=use_cache, **more).loss)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return found


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def backward(model, loss):
    """(loss, gradients) of a loss of the model."""
    loss.backward()
    return loss.detach(), gradients(model)


def loss_of(model, ids, **more):
    return model(ids, labels=ids, use_cache=False, **more).loss


def same(a, b):
    """(loss, gradients) of two models."""
    assert torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and a[1]
    for n, x in a[1].items():
        assert torch.equal(x, b[1][n]), n


def optimizers(*models):
    return [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in models]


def alike(models, count=5, after=lambda model, i: None, seed=0, **more):
    """Both models take the same steps."""
    optimizer = optimizers(*models)
    for i in range(count):
        found = []
        for model, o in zip(models, optimizer):
            torch.manual_seed(i)
            found.append(step(model, batch(model, seed=seed + i), o, **more))
            after(model, i)
        same(*found)


def both(models, count, run=lambda model, i: step(model, batch(model, seed=i))):
    """run(model, i) gives the same (loss, gradients) for both, without an optimizer."""
    for i in range(count):
        same(*[run(model, i) for model in models])


def test_losses_that_are_still_there(kernel, graph, device):  # noqa: F811
    """Nodes of autograd that belong to eager steps are alive at the capture."""
    models, kept = pair(kernel, device), []

    def run(model, i):
        kept.append(loss_of(model, batch(model, seed=i)))
        return backward(model, kept[-1])

    both(models, 5, run)
    assert graph.captures == 2 * LAYERS and graph.replays == 2 * LAYERS * (1 + 3)


def test_ddp_and_fsdp2(kernel, graph, device):  # noqa: F811
    """One process of each. Sharded weights move between forward and gradients: they are eager."""
    from torch.distributed.fsdp import fully_shard

    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        models = pair(kernel, device)
        both([torch.nn.parallel.DistributedDataParallel(m) for m in models], 5)
        assert graph.captures == 2 * LAYERS and graph.replays == 2 * LAYERS * (1 + 3)
        models, replays = pair(kernel, device), graph.replays
        mesh = torch.distributed.init_device_mesh(device, (1,))
        for model in models:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)

        def run(model, i):
            loss, found = step(model, tokens(2, 9, seed=i).to(device))
            return loss, {n: g.full_tensor() for n, g in found.items()}

        both(models, 5, run)
        assert graph.replays == replays
    finally:
        torch.distributed.destroy_process_group()


LAYERS = 2
ADAPT = {"full": lambda model: model, "lora": lora, "dropout": lambda m: lora(m, lora_dropout=0.2)}


@pytest.mark.parametrize("what", ADAPT)
def test_steps(kernel, graph, device, what):  # noqa: F811
    """Steps of an optimizer, with evaluation in between."""
    models = pair(kernel, device, adapt=ADAPT[what])

    def evaluate(model, i):
        model.eval()
        with torch.no_grad():
            model(batch(model, seed=99))
        model.train()

    alike(models, after=evaluate)
    assert graph.captures == 2 * LAYERS  # a trial, and the steps from the third on
    assert graph.replays == 2 * LAYERS * (1 + 3)


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2", "gemma2", "phi3", "qwen3_5_text", "olmo_hybrid", "qwen3_5_moe_text"]
)
def test_other_models(kernel, graph, device, name):  # noqa: F811
    alike(pair(kernel, device, name), count=4)
    if name in ("qwen3", "qwen2", "gemma2", "phi3"):
        assert graph.captures == 2 * LAYERS


def test_dropout_of_attention(kernel, graph, device):  # noqa: F811
    """Replays draw the random numbers that eager calls would."""
    alike(pair(kernel, device, attention_dropout=0.3))
    assert graph.captures == 2 * LAYERS


def test_autocast(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device, dtype=torch.float32)
    optimizer = optimizers(*models)
    for i in range(5):
        found = []
        for model, o in zip(models, optimizer):
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(model, batch(model, seed=i))
            found.append(backward(model, loss))
            o.step(), o.zero_grad()
        same(*found)
    assert graph.captures == 2 * LAYERS
    alike(models, 1)  # without autocast it is another call


def test_accumulated_gradients(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device)
    both(models, 6)  # without zero_grad
    assert graph.replays == 2 * LAYERS * (1 + 4)
    held = [p.grad for p in models[1].parameters() if p.grad is not None]
    before = [x.clone() for x in held]
    models[1].zero_grad()
    step(models[1], batch(models[1], seed=9))
    assert all(map(torch.equal, held, before))  # nobody else's memory


def test_two_forwards_before_a_backward(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device)
    alike(models, 3)
    replays, found = graph.replays, []
    for model in models:
        losses = [loss_of(model, batch(model, seed=i)) for i in range(3)]
        for loss in losses:
            loss.backward()
        found.append((torch.stack(losses).detach(), gradients(model)))
    same(*found)
    assert graph.replays == replays + 2 * LAYERS  # the others ran as they are
    alike(models, 2)
    assert graph.replays == replays + 3 * 2 * LAYERS


def test_a_forward_without_a_backward(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device)
    alike(models, 3)
    replays = graph.replays
    for _ in range(3):  # the loss is forgotten
        models[1](batch(models[1]), labels=batch(models[1]), use_cache=False)
    assert graph.replays == replays + 3 * LAYERS
    alike(models, 1)


@pytest.mark.parametrize("draws", [0.0, 0.3])
def test_a_second_backward(kernel, device, draws):  # noqa: F811
    """Gradients overwrite what the forward keeps, so it is computed again."""
    models = pair(kernel, device, attention_dropout=draws)
    alike(models, 3)
    found = []
    for model in models:
        torch.manual_seed(5)
        loss = loss_of(model, batch(model, seed=7))
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        found.append((loss.detach(), gradients(model)))
        model.zero_grad()
    same(*found)
    alike(models, 2)


def test_a_second_derivative(kernel, device):  # noqa: F811
    model = pair(kernel, device)[1]
    for i in range(3):
        step(model, batch(model, seed=i))
    loss = loss_of(model, batch(model))
    weight = model.model.layers[0].mlp.up_proj.weight
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.square().sum().backward()


def test_weights_that_change_before_the_backward(kernel, device):  # noqa: F811
    model = pair(kernel, device)[1]
    alike((model,), 0)
    for i in range(3):
        step(model, batch(model, seed=i))
    weight = model.model.layers[0].mlp.up_proj.weight
    loss = loss_of(model, batch(model))
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
    del loss
    step(model, batch(model))  # autograd's thread keeps a node that has failed until the next one
    loss = loss_of(model, batch(model))
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="moved to other memory"):
        loss.backward()


def test_shapes(kernel, graph, device):  # noqa: F811
    """Another shape runs eagerly; one that stays is captured anew."""
    models = pair(kernel, device)
    for lengths in ((9, 9, 9, 9), (7, 9, 7, 9), (7, 7, 7, 7)):
        for i, length in enumerate(lengths):
            same(*[step(m, batch(m, length=length, seed=i)) for m in models])
    assert graph.captures == 2 * 2 * LAYERS
    assert graph.replays == 2 * LAYERS * (1 + 2 + 2 + 1 + 2)


def test_shapes_that_never_stay(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device)
    for turn in range(5):
        for i in range(3):
            same(*[step(m, batch(m, length=7 + turn, seed=i)) for m in models])
    assert graph.captures == 3 * 2 * LAYERS  # then it is enough


def test_masks_and_positions(kernel, graph, device):  # noqa: F811
    """They are arguments that a replay reads anew."""
    models = pair(kernel, device)

    def run(model, i):
        ids = batch(model, seed=i)
        mask = torch.ones_like(ids)
        mask[0, : 1 + i] = 0
        positions = torch.arange(ids.shape[1], device=device)[None] + 3 * i
        return step(model, ids, attention_mask=mask, position_ids=positions)

    both(models, 5, run)
    assert graph.replays == 2 * LAYERS * (1 + 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kernel, graph, device, reentrant):  # noqa: F811
    models = pair(kernel, device)
    alike(models, 3)
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    replays = graph.replays
    alike(models, 3)
    assert graph.replays == replays
    for model in models:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
    alike(models, 4)
    assert graph.replays == replays + 2 * LAYERS * (1 + 2)  # they are captured anew


def test_checkpointing_by_hand(kernel, device):  # noqa: F811
    models = pair(kernel, device)
    alike(models, 3)
    found = []
    for model in models:
        embedded = model.get_input_embeddings()(batch(model)).detach().requires_grad_()
        y = checkpoint(
            lambda x, m=model: m.model(inputs_embeds=x, use_cache=False).last_hidden_state,
            embedded, use_reentrant=False,
        )  # fmt: skip
        y.sum().backward()
        found.append((y.detach(), {**gradients(model), "x": embedded.grad}))
        model.zero_grad()
    same(*found)


def test_frozen_layers_and_adapters_that_change(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device, adapt=lora)
    alike(models, 4)

    def frozen(model, part, trained):
        for n, p in model.named_parameters():
            if part in n:
                p.requires_grad_(trained)

    captures = graph.captures
    for trained in (False, True):
        for model in models:
            frozen(model, "layers.1.mlp.up_proj.lora_A", trained)
        alike(models, 4)
    assert graph.captures == captures + 2 * 2  # of one layer
    for model in models:
        model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 0.5
    alike(models, 4)
    for model in models:
        with model.disable_adapter():
            model(batch(model))
        model.merge_adapter()
        model.unmerge_adapter()
    alike(models, 4)


def test_weights_in_other_memory(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device)
    alike(models, 3)
    for model in models:
        for p in model.parameters():
            p.data = p.data * 1.5
    alike(models, 4)
    states = [copy.deepcopy(m.state_dict()) for m in models]
    for model, state in zip(models, states):
        model.load_state_dict(state)
    alike(models, 2)
    for model, state in zip(models, states):
        model.load_state_dict(state, assign=True)
    alike(models, 4)


def test_hooks(kernel, graph, device):  # noqa: F811
    """Of a part of a layer it runs eagerly; those of a layer itself run, around the replay."""
    models = pair(kernel, device)
    alike(models, 3)
    seen = []
    for model in models:
        layer = model.model.layers[0]
        layer.register_forward_hook(lambda *_: seen.append("layer"))
        layer.register_full_backward_hook(lambda *_: seen.append("gradient"))
        layer.mlp.up_proj.weight.register_hook(lambda g: g * 2)
        model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    alike(models, 4)
    assert [seen.count(x) for x in ("layer", "gradient", "mlp")] == [8, 8, 8]


class Scaled(torch.nn.Module):
    """SiLU times a number that is a parameter, a buffer or a tensor of its own."""

    def __init__(self, kind):
        super().__init__()
        if kind == "parameter":
            self.scale = torch.nn.Parameter(torch.ones(1))
        elif kind == "buffer":
            self.register_buffer("scale", torch.ones(1))
        else:
            self.scale = torch.ones(1)

    def forward(self, x):
        return torch.nn.functional.silu(x) * self.scale


def doubled(module, *gradients):
    return (gradients[0][0] * 2,)


def transposed(layer):
    layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.t()


def another(layer):
    layer.mlp.act_fn.scale = torch.nn.Parameter(layer.mlp.act_fn.scale.data)


def trained(layer):
    layer.mlp.act_fn.scale.requires_grad_()


# what is done to a layer that has replayed -> what its activation multiplies with
CHANGES = {
    "hook": (None, lambda layer: layer.mlp.register_full_backward_hook(doubled)),
    "pre_hook": (None, lambda layer: layer.mlp.up_proj.register_full_backward_pre_hook(doubled)),
    "transposed": (None, transposed),
    "parameter": ("parameter", another),
    "buffer": ("buffer", trained),
    "tensor": ("tensor", trained),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_gradients_read_changes(kernel, device, change):  # noqa: F811
    """Hooks of gradients, strides, and tensors of one equal value at the same address."""
    kind, after = CHANGES[change]
    models, found = pair(kernel, device), []
    layers = [m.model.layers[0] for m in models]
    for layer in layers:
        if kind is not None:
            layer.mlp.act_fn = Scaled(kind).to(layer.mlp.up_proj.weight)
            if kind == "tensor":  # which .to() leaves where it was
                layer.mlp.act_fn.scale = torch.ones(1).to(layer.mlp.up_proj.weight.detach())
    both(models, 4)
    for layer in layers:
        after(layer)
    for i in range(4):
        same(*[step(m, batch(m, seed=i)) for m in models])
        found = [layer.mlp.act_fn.scale.grad for layer in layers if kind is not None]
        assert not found or torch.equal(*found)


@pytest.mark.parametrize("kind", ["buffer", "tensor"])
def test_buffers_that_change_before_the_backward(kernel, device, kind):  # noqa: F811
    models = pair(kernel, device)
    for model in models:
        mlp = model.model.layers[0].mlp
        mlp.act_fn = Scaled(kind)
        mlp.act_fn.scale = torch.ones(1).to(mlp.up_proj.weight.detach())
    alike(models, 3)
    for model in models:
        loss = loss_of(model, batch(model))
        with torch.no_grad():
            model.model.layers[0].mlp.act_fn.scale.mul_(3)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_tensors_that_a_forward_writes(kernel, device):  # noqa: F811
    """Rehearsals leave them as they were."""

    class Counting(Scaled):
        def forward(self, x):
            self.scale += 1
            return torch.nn.functional.silu(x)

    models = pair(kernel, device)
    for model in models:
        model.model.layers[0].mlp.act_fn = Counting("tensor")
        model.model.layers[0].mlp.act_fn.scale = torch.ones((), device=device)
    alike(models, 5)
    assert [m.model.layers[0].mlp.act_fn.scale.item() for m in models] == [6, 6]


def test_layers_that_are_unfrozen(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device)
    for model in models:
        model.requires_grad_(False)
        model.model.layers[1].requires_grad_(True)
    alike(models, 4)
    assert graph.captures == 2
    for model in models:
        model.model.layers[0].requires_grad_(True)
    alike(models, 4)
    assert graph.captures == 2 * 3


def test_ways_to_multiply_fp32(kernel, graph, device):  # noqa: F811
    """torch answers one of its questions, depending on how it was set."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch has one way")
    models, before = pair(kernel, device), matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        alike(models, 4)
        assert graph.captures == 2 * LAYERS
        matmul.fp32_precision = "ieee"
        alike(models, 3)
        assert graph.captures == 2 * 2 * LAYERS
    finally:
        matmul.fp32_precision = before


def test_attention_of_torch_that_is_patched(kernel, device, monkeypatch):  # noqa: F811
    models, F = pair(kernel, device), torch.nn.functional
    alike(models, 4)
    torchs = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: 2 * torchs(*a, **k))
    alike(models, 4)


def test_packed_sequences(kernel, device):  # noqa: F811
    """Where they begin is read anew in each step.

    On a CPU GDN's reference reads it by tolist, which an emulated graph does not see.
    """
    models = pair(kernel, device, "qwen3_5_text" if device == "cuda" else "llama")
    T = 128 if device == "cuda" else 18
    for i, cut in enumerate((4, 4, 4, 4, 9, 2, 17, 9)):
        cu = torch.tensor([0, cut, T], dtype=torch.int32, device=device)
        index = (torch.arange(T, device=device)[None] >= cut).int()
        positions = torch.arange(T, device=device)[None] - index * cut
        found = []
        for model in models:
            found.append(step(
                model, tokens(1, T, seed=i).to(device), position_ids=positions, seq_idx=index,
                cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=T, max_length_k=T,
            ))  # fmt: skip
            model.zero_grad()
        same(*found)


def test_outputs_that_are_recorded(kernel, device):  # noqa: F811
    models = pair(kernel, device)

    def run(model, i):
        ids = batch(model, seed=i)
        out = model(ids, labels=ids, use_cache=False, output_hidden_states=i % 2 == 0)
        hidden = 0.0 if i % 2 else out.hidden_states[1].square().mean()
        return backward(model, out.loss + hidden)

    both(models, 5, run)


def test_outputs_are_nobody_elses(kernel, device):  # noqa: F811
    """What a step gives stays as it is in later steps."""
    model = pair(kernel, device)[1]
    kept = []
    model.model.layers[0].register_forward_hook(lambda m, a, out: kept.append((out, out.clone())))
    for i in range(6):
        step(model, batch(model, seed=i))
    assert all(torch.equal(a, b) for a, b in kept)


def test_a_cache_runs_eagerly(kernel, graph, device, caplog):  # noqa: F811
    alike(pair(kernel, device), 4, use_cache=True)
    assert graph.captures == 0 and "an argument is a DynamicCache" in caplog.text


def test_what_cannot_be_captured(kernel, graph, device, caplog):  # noqa: F811
    models = pair(kernel, device)

    class Reading(torch.nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > -1e30 else x

    for model in models:
        mlp = model.model.layers[0].mlp
        mlp.act_fn = torch.nn.Sequential(mlp.act_fn, Reading())
    alike(models, 5)
    assert "trains without a CUDA graph" in caplog.text
    assert graph.replays == 2 * (1 + 3)  # of the other layer


def test_arguments_on_the_host(kernel, graph, device, caplog):  # noqa: F811
    """Their values would be part of a graph."""
    models = pair(kernel, device)
    for model in models:
        forward = type(model.model.layers[0].mlp).forward
        model.model.layers[0].mlp.scale = torch.ones(())  # on the CPU

        def scaled(self, x, forward=forward):
            return forward(self, x) * self.scale.item()

        kind = type(model.model.layers[0].mlp)
        model.model.layers[0].mlp.__class__ = type(kind.__name__, (kind,), {"forward": scaled})
    for i in range(5):
        for model in models:
            model.model.layers[0].mlp.scale.fill_(i + 1)
        same(*[step(m, batch(m, seed=i)) for m in models])
    assert "trains without a CUDA graph" in caplog.text
    module = submodule("models.layer_call")
    for tensors in ([], [torch.ones(1), torch.ones(1, device="meta")]):
        with pytest.raises(module.Eager):
            module.device_of(tensors)


class ReadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2 if dy.sum().item() > -1e30 else dy


def test_gradients_that_cannot_be_captured(kernel, graph, device, caplog):  # noqa: F811
    models = pair(kernel, device)

    class Reading(torch.nn.Module):
        def forward(self, x):
            return ReadBackward.apply(x)

    for model in models:
        mlp = model.model.layers[0].mlp
        mlp.act_fn = torch.nn.Sequential(mlp.act_fn, Reading())
    alike(models, 5)
    assert "trains without a CUDA graph" in caplog.text
    assert graph.captures == 2 * LAYERS and graph.replays == 2 * (1 + 3)  # of the other layer


def test_a_tensor_that_is_no_parameter(kernel, graph, device, caplog):  # noqa: F811
    models = pair(kernel, device)
    found = []
    for model in models:
        scale = torch.ones((), device=device, requires_grad=True)

        class Scaled(torch.nn.Module):
            def forward(self, x, scale=scale):
                return torch.nn.functional.silu(x) * scale

        model.model.layers[0].mlp.act_fn = Scaled()
        for i in range(5):
            step(model, batch(model, seed=i))
        found.append((scale.grad, gradients(model)))
    same(*found)
    assert "no parameter of its modules" in caplog.text


def test_buffers_that_a_forward_writes(kernel, graph, device, caplog):  # noqa: F811
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return torch.nn.functional.silu(x)

    models = pair(kernel, device)
    for model in models:
        model.model.layers[0].mlp.act_fn = Counting().to(device)
    alike(models, 5)
    counts = [m.model.layers[0].mlp.act_fn.count.item() for m in models]
    assert counts == [5, 5] and "writes into its input" in caplog.text


def test_copies_pickles_and_restore(kernel, graph, device):  # noqa: F811
    models = pair(kernel, device)
    alike(models, 4)
    copies = [copy.deepcopy(m) for m in models]
    alike(copies, 4)
    alike(models, 2)
    assert graph.captures == 2 * 2 * LAYERS
    assert models[1].state_dict().keys() == models[0].state_dict().keys()
    attributes = submodule("models.serving")._State(models[1].model.layers[0]).__reduce__()[1][0]
    assert "_modules" in attributes and "_training_graphs" not in attributes
    alive = len(graph.alive)
    kernel.restore(models[1])
    gc.collect()
    assert len(graph.alive) == alive - 2 * LAYERS
    assert not any("_training_graphs" in m.__dict__ for m in models[1].modules())
    kinds = {type(m).__mro__[1].__name__ for m in models[1].modules()}
    assert "Served" not in kinds
    kernel.kernelize(models[1], training_graphs=True)
    kernel.kernelize(models[1])
    replays = graph.replays
    alike(models, 4)
    assert graph.replays == replays


def test_two_models_and_threads(kernel, graph, device):  # noqa: F811
    """Two models in turns, then one in two threads."""
    first, second = pair(kernel, device), pair(kernel, device, "qwen3")
    for i in range(4):
        alike(first, 1, seed=i), alike(second, 1, seed=i)
    assert graph.captures == 2 * 2 * LAYERS
    ids = [batch(first[0], seed=i) for i in range(2)]
    parameters = [[p for p in m.parameters() if p.requires_grad] for m in first]

    def gradients_of(model, places, x):
        loss = model(x, labels=x, use_cache=False).loss
        return torch.autograd.grad(loss, places)

    right = [gradients_of(first[0], parameters[0], x) for x in ids]
    wrong = []

    def run(i):
        for _ in range(5):
            got = gradients_of(first[1], parameters[1], ids[i])
            if not all(map(torch.equal, got, right[i])):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_report(kernel, device):  # noqa: F811
    model = random_model("llama", device)
    report = kernel.kernelize(model, training_graphs=True)
    (row,) = [row for row in report.rows if row.layer == "training"]
    assert row.note == "CUDA graphs of 2 layers" and row.reason is None
    model.model._tp_size = 2
    report = kernel.kernelize(model, training_graphs=True)
    assert "exchange tensors with other GPUs" in report.left[-1].reason
    report = kernel.kernelize(torch.nn.Linear(4, 4).to(device), training_graphs=True)
    assert "no layers of transformers" in report.rows[-1].reason
    with pytest.raises(TypeError, match="training_graphs"):
        kernel.kernelize(model, training_graphs="yes")
