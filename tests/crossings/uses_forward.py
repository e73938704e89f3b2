"""Uses of a model's forward: inputs, masks, caches, dtypes, hooks, copies, compilers, threads."""

import concurrent.futures
import contextlib
import copy
import pickle

import torch
from sides import use
from tiny_models import logits
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def layers_of(model):
    return model.model.layers


# ---- what goes in


def prompt(name, after=None, before=None, around=contextlib.nullcontext, **facts):
    """Logits of a model that is changed before it is kernelized or after."""

    @use(name, **facts)
    def run(s):
        model = s.make()
        if before is not None:
            before(model)
        s.serve(model)
        if after is not None:
            after(model)
        with around():
            return logits(model, s.ids())


use("a prompt")(lambda s: logits(s.served(), s.ids()))
use("a prompt of 70 tokens")(lambda s: logits(s.served(), s.ids(1, 70)))


@use("padding on the left")
def left(s):
    mask = torch.ones_like(s.ids())
    mask[0, :4] = 0
    return logits(s.served(), s.ids(), attention_mask=mask)[mask.bool()]


@use("padding on the right")
def right(s):
    mask = torch.ones_like(s.ids())
    mask[1, 5:] = 0
    return logits(s.served(), s.ids(), attention_mask=mask)[mask.bool()]


@use("a row of padding alone")
def padded_row(s):
    mask = torch.ones_like(s.ids())
    mask[0] = 0
    return logits(s.served(), s.ids(), attention_mask=mask)[1]


@use("packed by position_ids")
def packed(s):
    positions = torch.cat([torch.arange(4), torch.arange(5)]).unsqueeze(0).to(s.device)
    return logits(s.served(), s.ids(1, 9), position_ids=positions, use_cache=False)


@use("a mask of four dimensions")
def four_dimensions(s):
    mask = torch.full((2, 1, 9, 9), -1e4, device=s.device).triu(1).to(s.make().dtype)
    return logits(s.served(), s.ids(), attention_mask=mask, use_cache=False)


@use("inputs_embeds")
def embeds(s):
    model = s.served()
    with torch.no_grad():
        return model(inputs_embeds=model.get_input_embeddings()(s.ids())).logits


@use("inputs_embeds with strides of their own")
def strided(s):
    model = s.served()
    with torch.no_grad():
        x = model.get_input_embeddings()(s.ids())
        return model(inputs_embeds=x.permute(2, 0, 1).contiguous().permute(1, 2, 0)).logits


@use("rows of inputs_embeds 2^31 elements apart")
def far(s):
    model = s.served()
    with torch.no_grad():
        x = model.get_input_embeddings()(s.ids())
        apart = 2**31 + 64
        memory = torch.empty(apart + x[0].numel(), dtype=x.dtype, device=s.device)
        wide = memory.as_strided(x.shape, (apart, *x.stride()[1:]))
        return model(inputs_embeds=wide.copy_(x)).logits


def turned(model):
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight.data = module.weight.data.t().contiguous().t()


def expanded(model):
    for p in model.parameters():
        if p.ndim == 1 and p.is_floating_point():
            p.data = p.data[:1].expand(p.shape)


prompt("weights with strides of their own", before=turned)
prompt("weights that are expanded", before=expanded)
use("no rows")(lambda s: logits(s.served(), s.ids()[:0]))


@use("no rows, loss and gradients")
def no_rows_backward(s):
    model = s.served().train()
    loss = model(s.ids()[:0]).logits.sum()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "gradient": grads}


use("no tokens")(lambda s: logits(s.served(), s.ids()[:, :0]))
use("logits_to_keep")(lambda s: logits(s.served(), s.ids(), logits_to_keep=2))


@use("hidden states")
def hidden(s):
    with torch.no_grad():
        return s.served()(s.ids(), output_hidden_states=True).hidden_states


@use("attentions")
def attentions(s):
    model = s.make()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return s.serve(model)(s.ids(), output_attentions=True).attentions


prompt("eager attention set afterwards", lambda model: model.set_attn_implementation("eager"))
prompt("flex attention", lambda model: model.set_attn_implementation("flex_attention"), gpus=1)


@use("a classifier of sequences")
def classifier(s):
    import transformers

    config = s.make().config
    config.num_labels = 3
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    return logits(s.serve(model.to(s.device)), s.ids())


# ---- caches


@use("a prompt in two parts")
def parts(s):
    model = s.served()
    with torch.no_grad():
        first = model(s.ids()[:, :5], use_cache=True)
        second = model(s.ids()[:, 5:], past_key_values=first.past_key_values)
    return [first.logits, second.logits, second.past_key_values]


def steps(model, ids, cache, count=4):
    found = [logits(model, ids, past_key_values=cache)]
    for i in range(count):
        found.append(logits(model, ids[:, i : i + 1], past_key_values=cache))
    return [found, cache]


def cached(s, kind="DynamicCache", **size):
    """A model, and a cache for it."""
    import transformers

    model = s.served()
    return model, getattr(transformers, kind)(config=model.config, **size)


@use("tokens on a dynamic cache")
def dynamic(s):
    model, cache = cached(s)
    return steps(model, s.ids(), cache)


@use("tokens on a static cache")
def static(s):
    model, cache = cached(s, "StaticCache", max_cache_len=16)
    return steps(model, s.ids(), cache)


@use("a cache that changes its rows")
def rows(s):
    model, cache = cached(s)
    first = steps(model, s.ids(), cache, 2)
    cache.reorder_cache(torch.tensor([1, 0], device=s.device))
    second = steps(model, s.ids(seed=1), cache, 2)
    cache.batch_repeat_interleave(2)
    return [first, second, steps(model, s.ids(4, 3), cache, 2)]


@use("a cache that is cropped")
def cropped(s):
    model, cache = cached(s)
    steps(model, s.ids(), cache, 2)
    cache.crop(-3)
    return steps(model, s.ids(seed=1), cache, 2)


@use("a cache that is copied")
def cache_copied(s):
    model, cache = cached(s)
    steps(model, s.ids(), cache, 2)
    other = copy.deepcopy(cache)
    return [steps(model, s.ids(seed=1), cache, 2), steps(model, s.ids(seed=2), other, 2)]


# ---- dtypes and modes


def in_dtype(name, change):
    @use(name, rough=name[0] != "d")
    def run(s):
        model = change(s.served())
        return [logits(model, s.ids()), steps(model, s.ids(), None, 0)[0]]


in_dtype("half() afterwards", lambda model: model.half())
in_dtype("bfloat16() afterwards", lambda model: model.bfloat16())
in_dtype("double() afterwards", lambda model: model.double())


use("half() before", rough=True)(lambda s: logits(s.serve(s.make().half()), s.ids()))


@use("autocast", rough=True)
def autocast(s):
    model = s.served()
    with torch.autocast(s.device, torch.bfloat16):
        return logits(model, s.ids())


@use("autocast, tokens on a static cache", rough=True)
def autocast_static(s):
    with torch.autocast(s.device, torch.bfloat16):
        return static(s)


@use("inference_mode")
def inference(s):
    model = s.served()
    with torch.inference_mode():
        return model(s.ids()).logits.clone()


@use("a model made in inference_mode")
def made_in_inference(s):
    with torch.inference_mode():
        model = s.served()
        return model(s.ids()).logits.clone()


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


prompt("deterministic algorithms on poisoned memory", around=deterministic)


@use("another default dtype")
def default_dtype(s):
    model = s.make()
    torch.set_default_dtype(torch.float64)
    try:
        return logits(s.serve(model), s.ids())
    finally:
        torch.set_default_dtype(torch.float32)


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


prompt("a counter of operations", around=lambda: FlopCounterMode(display=False))
prompt("a mode of torch functions", around=Mode)


@use("a default device")
def default_device(s):
    model = s.make()
    with torch.device(s.device):
        return logits(s.serve(model), s.ids())


# ---- hooks and forwards that are replaced


def hooked(name, where, method="register_forward_hook", hook=None):
    @use(name)
    def run(s):
        model = s.served()
        hook_ = hook or (lambda module, args, out: scaled(out))
        for part in where(model):
            getattr(part, method)(hook_)
        return [logits(model, s.ids()), steps(model, s.ids(), None, 0)[0]]


def scaled(out):
    if isinstance(out, tuple):
        return (scaled(out[0]), *out[1:])
    return out * 1.5 if isinstance(out, torch.Tensor) and out.is_floating_point() else out


def named(*ends):
    return lambda model: [m for n, m in model.named_modules() if n.endswith(ends)]


def pre(module, args):
    return tuple(scaled(x) for x in args)


def pre_words(module, args, words):
    return tuple(scaled(x) for x in args), {
        k: scaled(x) if k in ("hidden_states", "x") else x for k, x in words.items()
    }


hooked("hooks of decoder layers", layers_of)
hooked("hooks of MLPs", named("mlp"))
hooked("hooks of norms", named("norm"))
hooked("hooks of attention", named("self_attn", "linear_attn"))
hooked("hooks of projections", named("q_proj", "up_proj", "o_proj", "in_proj_qkv"))
hooked("hooks of experts and routers", named("experts", "gate"))
hooked("hooks of activations", named("act_fn"))
hooked("hooks before norms", named("norm"), "register_forward_pre_hook", pre)
hooked("hooks before projections", named("q_proj", "down_proj"), "register_forward_pre_hook", pre)


@use("hooks before layers, with keywords")
def pre_keywords(s):
    model = s.served()
    for part in (*layers_of(model), *named("self_attn", "linear_attn")(model)):
        part.register_forward_pre_hook(pre_words, with_kwargs=True)
    return logits(model, s.ids())


@use("a hook of all modules")
def global_hook(s):
    model = s.served()

    def shift(module, args, out):
        return out * 1.25 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(shift)
    try:
        return logits(model, s.ids())
    finally:
        handle.remove()


def hooked_before(model):
    for part in (*named("up_proj", "norm")(model), layers_of(model)[0]):
        part.register_forward_hook(lambda module, args, out: scaled(out))


prompt("hooks that were there before", before=hooked_before)


@use("hooks that are gone again")
def hooks_gone(s):
    model = s.served()
    handles = [
        part.register_forward_hook(lambda module, args, out: scaled(out))
        for part in model.modules()
    ]
    first = logits(model, s.ids())
    for handle in handles:
        handle.remove()
    return [first, logits(model, s.ids())]


def change(name, do):
    """A change of the model after kernelize, and the same before it."""

    @use(f"{name}, afterwards")
    def after(s):
        model = s.served()
        first = logits(model, s.ids())
        do(model)
        return [first, logits(model, s.ids())]

    @use(f"{name}, before")
    def before(s):
        model = s.make()
        do(model)
        return logits(s.serve(model), s.ids())


def each(ends, do):
    def run(model):
        for part in named(*ends)(model):
            do(part)

    return run


def another_forward(part):
    own = part.forward
    part.forward = lambda *args, **words: scaled(own(*args, **words))


def another_class(part):
    kind = type(part)

    def forward(self, *args, **words):
        return scaled(kind.forward(self, *args, **words))

    part.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def other_mlp(model):
    width = model.config.hidden_size
    for layer in layers_of(model):
        layer.mlp = nn.Sequential(nn.LayerNorm(width), nn.Tanh()).to(model.device, model.dtype)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def pruned(part):
    if type(part) is nn.Linear:
        from torch.nn.utils import prune

        prune.l1_unstructured(part, "weight", amount=0.3)


def weight_normed(part):
    if type(part) is nn.Linear:
        nn.utils.parametrizations.weight_norm(part)


def spectral(part):
    if type(part) is nn.Linear:
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(part)
        part.eval()


change("forwards of MLPs", each(("mlp",), another_forward))
change("forwards of norms", each(("norm",), another_forward))
change("forwards of attention", each(("self_attn",), another_forward))
change("classes of MLPs", each(("mlp",), another_class))
change("classes of norms", each(("input_layernorm",), another_class))
change("classes of projections", each(("q_proj", "down_proj"), another_class))
change("weight_norm", each(("q_proj", "down_proj", "up_proj", "in_proj_z"), weight_normed))
change("spectral_norm", each(("v_proj", "gate_proj"), spectral))
change("pruning", each(("q_proj", "up_proj", "o_proj"), pruned))
change("weights in place", each(("norm", "up_proj"), lambda m: m.weight.data.view(-1)[:9].zero_()))
change("a layer less", lambda model: layers_of(model).__delitem__(0))
change("another activation", each(("mlp",), lambda m: setattr(m, "act_fn", nn.GELU())))
change("more words", lambda model: model.resize_token_embeddings(111, mean_resizing=False))
change(
    "tied words", lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight)
)
change("MLPs of another kind", other_mlp)


# ---- copies, files


@use("a deepcopy")
def deepcopied(s):
    model = s.served()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return logits(other, s.ids())


@use("a deepcopy that is restored")
def copy_restored(s):
    model = s.served()
    other = s.restore(copy.deepcopy(model))
    return [logits(other, s.ids()), logits(model, s.ids())]


def without_functions(model):
    """The model without the functions that the package `kernels` puts into it, which have no
    pickle."""
    for module in model.modules():
        module.__dict__.pop("_kernel_funcs", None)
        for name in [n for n, m in module._modules.items() if type(m).__name__ == "Func"]:
            del module._modules[name]
    return model


def names_in(model):
    return {name for module in model.modules() for name in vars(module)}


@use("pickle")
def pickled(s):
    model = pickle.loads(pickle.dumps(without_functions(s.served())))
    return logits(model, s.ids())


@use("pickle, then restore")
def pickled_restored(s):
    model = without_functions(s.served(cuda_graphs=True))
    model = s.restore(pickle.loads(pickle.dumps(model)))
    left = sorted(names_in(model) - names_in(without_functions(s.make())))
    return [logits(model, s.ids()), left]


@use("torch.save of the model")
def saved(s):
    torch.save(without_functions(s.served()), s.folder / "model.pt")
    return logits(torch.load(s.folder / "model.pt", weights_only=False), s.ids())


@use("save_pretrained")
def save_pretrained(s):
    model = s.served()
    model.save_pretrained(s.folder / "model")
    other = type(model).from_pretrained(s.folder / "model").to(s.device).eval()
    return [logits(other, s.ids()), logits(s.serve(other), s.ids())]


@use("state_dict into another model")
def state_dict(s):
    model = s.served()
    found = {name: x.clone() for name, x in model.state_dict().items()}
    other = s.served()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(found)
    return [sorted(found), logits(other, s.ids())]


@use("state_dict that is assigned")
def assigned(s):
    other, found = s.served(), s.make().state_dict()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(found, assign=True)
    return logits(other, s.ids())


@use("restore")
def restored(s):
    model = s.served()
    logits(model, s.ids())
    left = sorted(names_in(s.restore(model)) - names_in(s.make()))
    return [logits(model, s.ids()), left]


@use("kernelize twice, restore once")
def twice(s):
    model = s.serve(s.served())
    first = logits(model, s.ids())
    return [first, logits(s.restore(model), s.ids())]


use("memory that processes share")(lambda s: logits(s.served().share_memory(), s.ids()))


@use("moved to meta and back")
def meta(s):
    model, source = s.served(), s.make().state_dict()
    model = model.to("meta").to_empty(device=s.device)
    model.load_state_dict(source)
    for own, other in zip(model.modules(), s.make().modules()):
        for name, x in other._buffers.items():
            if x is not None and name not in source:
                own._buffers[name] = x
    return logits(model, s.ids())


# ---- compilers


def compiled(model, backend="eager", **options):
    torch.compiler.reset()
    return torch.compile(model, backend=backend, fullgraph=True, **options)


use("torch.compile in one graph", slow=True)(lambda s: logits(compiled(s.served()), s.ids()))


@use("torch.compile, sizes that vary", slow=True)
def compiled_dynamic(s):
    model = compiled(s.served(), dynamic=True)
    return [logits(model, s.ids(*shape), use_cache=False) for shape in ((2, 9), (3, 12))]


@use("torch.compile with labels", slow=True)
def compiled_labels(s):
    with torch.no_grad():
        return compiled(s.served())(s.ids(), labels=s.ids(seed=1), use_cache=False).loss


@use("torch.compile, gradients", slow=True)
def compiled_gradients(s):
    model = s.served().train()
    out = compiled(model, "aot_eager")(s.ids(), use_cache=False).logits
    out.pow(2).sum().backward()
    return {
        "logits": out,
        "gradient": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


@use("torch.compile of each layer", slow=True)
def compiled_layers(s):
    torch.compiler.reset()
    model = s.served()
    for layer in layers_of(model):
        layer.compile(backend="eager")
    return logits(model, s.ids())


@use("torch.export", slow=True)
def exported(s):
    model = s.served()
    with torch.no_grad():
        program = torch.export.export(model, (s.ids(),), {"use_cache": False}, strict=False)
        return program.module()(s.ids(seed=1), use_cache=False).logits


@use("torch.jit.trace", slow=True)
def traced(s):
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    model = s.served()
    with torch.no_grad():
        return torch.jit.trace(Logits(), (s.ids(),), check_trace=False)(s.ids(seed=1))


@use("fake tensors")
def fake(s):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, ids = s.served(), s.ids()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return str(tuple(model(ids, use_cache=False).logits.shape))


# ---- threads


def together(jobs):
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]


@use("four threads on one model")
def threads(s):
    model = s.served()
    return together(
        [lambda i=i: [logits(model, s.ids(seed=i)) for _ in range(5)] for i in range(4)]
    )


@use("a model for each of three threads")
def threads_kernelize(s):
    def job(i):
        return logits(s.serve(models[i]), s.ids(seed=i))

    models = [s.make() for _ in range(3)]
    return together([lambda i=i: job(i) for i in range(3)])


@use("threads of gradients")
def threads_backward(s):
    def job(i):
        x = embed(s.ids(seed=i)).detach().requires_grad_()
        out = model(inputs_embeds=x, use_cache=False).logits
        return {"gradient": torch.autograd.grad(out.pow(2).sum(), x)[0]}

    model = s.served()
    embed = model.get_input_embeddings()
    return together([lambda i=i: job(i) for i in range(3)])
