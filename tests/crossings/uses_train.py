"""Uses of a model in training: losses, gradients, checkpointing, what torch does around them."""

import contextlib
import functools

import torch
from sides import use
from uses_forward import layers_of


def gradients_of(model) -> dict:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def step(model, ids, labels, **words):
    out = model(ids, labels=labels, **words)
    out.loss.backward()
    return {"loss": out.loss, "logits": out.logits, "gradient": gradients_of(model)}


def nothing(model):
    pass


def training(
    name, after=nothing, before=None, around=contextlib.nullcontext, labels=nothing, **words
):
    """A step of a model that is set to train and changed before it is kernelized, or after."""

    @use(name)
    def run(s):
        model, given = s.make(), s.ids(seed=1)
        if before is not None:
            before(model.train())
        after(s.serve(model).train())
        labels(given)
        with around():
            return step(model, s.ids(), given, **words)


def checkpointed(model, reentrant=False):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def norms_alone(model):
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    checkpointed(model, True)
    model.enable_input_require_grads()


training("a step of training", before=nothing)
training("a step of training without a cache", before=nothing, use_cache=False)
training("a mean over another number", before=nothing, num_items_in_batch=5)
training("checkpointing, use_reentrant", before=lambda model: checkpointed(model, True))
training("checkpointing, not use_reentrant", before=checkpointed)


def graphed(name, before=lambda model, i: None, words=lambda s, i: {}, **facts):
    """Steps of a model whose layers train by CUDA graphs from the third on."""

    @use(f"{name}, CUDA graphs of layers", graphs=True, **facts)
    def run(s):
        model, found = s.served(training_graphs=True).train(), []
        for i in range(4):
            before(model, i)
            with torch.autocast(s.device, torch.bfloat16, enabled=bool(facts.get("rough"))):
                how = {"use_cache": False, **words(s, i)}
                found.append(step(model, s.ids(seed=2 * i), s.ids(seed=2 * i + 1), **how))
            with torch.no_grad():
                for p in [p for p in model.parameters() if p.grad is not None]:
                    p.mul_(0.99)
        return found


graphed("steps of training")
graphed("steps under autocast", rough=True)
graphed("steps with positions of their own", words=lambda s, i: {"position_ids": s.ids() * 0 + i})
graphed("steps with a cache", words=lambda s, i: {"use_cache": True})
graphed("steps, then checkpointing", lambda model, i: i == 3 and checkpointed(model))
graphed(
    "steps, then other memory",
    lambda model, i: [setattr(p, "data", p.data.clone()) for p in model.parameters() if i == 3],
)


training("checkpointing set afterwards", checkpointed)
training("checkpointing with frozen weights", norms_alone)


@use("dropout with a seed")
def dropout(s):
    model = s.make().train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    model.set_attn_implementation("eager")
    s.serve(model)
    torch.manual_seed(3)
    return step(model, s.ids(), s.ids(seed=1))


def by_autocast(name, change=nothing):
    @use(name, rough=True)
    def run(s):
        model = s.served().train()
        change(model)
        with torch.autocast(s.device, torch.bfloat16):
            out = model(s.ids(), labels=s.ids(seed=1))
        out.loss.backward()
        return {"loss": out.loss, "gradient of the words": model.model.embed_tokens.weight.grad}


by_autocast("autocast, gradients")
by_autocast("autocast and checkpointing", checkpointed)
training("labels that are all ignored", labels=lambda given: given[0].fill_(-100))


@use("padding, gradients")
def padding(s):
    model = s.served().train()
    mask, labels = torch.ones_like(s.ids()), s.ids(seed=1)
    mask[0, 6:], labels[0, 6:] = 0, -100
    out = model(s.ids(), labels=labels, attention_mask=mask)
    out.loss.backward()
    return {"loss": out.loss, "gradient": gradients_of(model)}


@use("two steps of SGD")
def sgd(s):
    model = s.served().train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for i in range(3):
        losses.append(step(model, s.ids(seed=i), s.ids(seed=i + 1))["loss"].detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@use("gradients of two batches")
def accumulated(s):
    model = s.served().train()
    step(model, s.ids(), s.ids(seed=1))
    return step(model, s.ids(seed=2), s.ids(seed=3))


def matrices_alone(model):
    for name, p in model.named_parameters():
        p.requires_grad_(p.ndim > 1 and "embed" not in name)


training("frozen norms and words", matrices_alone)


@use("gradients of inputs alone")
def inputs(s):
    model = s.served()
    model.requires_grad_(False)
    x = model.get_input_embeddings()(s.ids()).detach().requires_grad_()
    out = model(inputs_embeds=x).logits
    return {"logits": out, "gradient": torch.autograd.grad(out.pow(2).sum(), x)}


@use("a backward twice")
def retained(s):
    model = s.served().train()
    loss = model(s.ids(), labels=s.ids(seed=1)).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return {"gradient": gradients_of(model)}


@use(
    "second derivatives",
    refused="second derivative",
    note=(
        "on a GPU kernels refuse with a NotImplementedError, which names the function that has no "
        "second derivative"
    ),
)
def second(s):
    model = s.served().train()
    model.set_attn_implementation("eager")
    for name, p in model.named_parameters():  # kernels of transformers give codes no gradient
        p.requires_grad_(p.element_size() > 1 and "scale_inv" not in name)
    loss = model(s.ids(), labels=s.ids(seed=1)).loss
    weights = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    sum(g.pow(2).sum() for g in first if g is not None).backward()
    return {"gradient": gradients_of(model)}


@use("a step of training without gradients")
def without(s):
    model = s.served().train()
    with torch.no_grad():
        return model(s.ids(), labels=s.ids(seed=1)).loss


training("activations kept on the CPU", around=torch.autograd.graph.save_on_cpu)
training("detect_anomaly", around=functools.partial(torch.autograd.detect_anomaly, check_nan=True))


@use("functional_call")
def functional(s):
    model = s.served()
    weights = {n: p.detach() * 0.9 for n, p in model.named_parameters()}
    with torch.no_grad():
        return torch.func.functional_call(model, weights, (s.ids(),)).logits


@use("torch.func.grad")
def func_grad(s):
    model = s.served()
    weights = dict(model.named_parameters())

    def loss(weights):
        out = torch.func.functional_call(model, weights, (s.ids(),), {"use_cache": False})
        return out.logits.pow(2).mean()

    return {"gradient": torch.func.grad(loss)({n: p.detach() for n, p in weights.items()})}


@use("forward-mode derivatives")
def jvp(s):
    model = s.served()
    model.set_attn_implementation("eager")
    x = model.get_input_embeddings()(s.ids()).detach()

    def run(x):
        return model(inputs_embeds=x, use_cache=False).logits

    return torch.func.jvp(run, (x,), (torch.ones_like(x),))[1]


@use("hooks of gradients")
def backward_hooks(s):
    model, seen = s.served().train(), {}
    for i, layer in enumerate(layers_of(model)):
        layer.mlp.register_full_backward_hook(
            lambda module, dx, dy, i=i: seen.update({f"gradient {i}": [dx[0], dy[0]]})
        )
        layer.input_layernorm.register_full_backward_hook(
            lambda module, dx, dy, i=i: (dx[0] * 0.5,)
        )
    return [step(model, s.ids(), s.ids(seed=1)), dict(sorted(seen.items()))]


def doubled_gradients(model):
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient * 2)


training("hooks of a parameter's gradient", doubled_gradients)


@use("gradients through a cache")
def through_cache(s):
    model = s.served().train()
    first = model(s.ids(), use_cache=True)
    second = model(s.ids(2, 4, seed=1), past_key_values=first.past_key_values)
    second.logits.pow(2).sum().backward()
    return {"logits": second.logits, "gradient": gradients_of(model)}


@use("training, then generate")
def then_generate(s):
    from uses_generate import generate

    model = s.served(cuda_graphs=True).train()
    found = step(model, s.ids(), s.ids(seed=1))
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(0.05 * p.grad)
    return [found, generate(s, model.eval(), kept=False)]


@use("mode=training, used for inference")
def other_mode(s):
    model = s.served(mode="training")
    with torch.no_grad():
        return model(s.ids()).logits


@use("mode=inference, used for training")
def inference_mode(s):
    return step(s.served(mode="inference").train(), s.ids(), s.ids(seed=1))
