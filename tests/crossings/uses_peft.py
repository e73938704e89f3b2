"""Adapters and prompts of PEFT, each in training, in generate and with CUDA graphs."""

import copy

import pytest
import torch
from sides import use
from uses_generate import generate
from uses_train import gradients_of

LINEAR = "all-linear"
WORDS = {"task_type": "CAUSAL_LM"}
PROMPTS = {
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 16}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
}
LORAS = {
    "LoRA": {},
    "LoRA of MLPs": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "LoRA of attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    # as large as the others: at twice that, sums of bf16 are off by .17 of fp32's in Kimi Linear
    "LoRA, rslora": {"use_rslora": True, "lora_alpha": 4},
    "LoRA, DoRA": {"use_dora": True},
    "LoRA with biases": {"bias": "lora_only", "lora_bias": True},
    "LoRA with dropout": {"lora_dropout": 0.3},
    "LoRA of words": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "LoRA and modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
    "LoRA and new words": {"trainable_token_indices": [3, 5, 7]},
    "LoRA of one layer": {"layers_to_transform": [1], "target_modules": ["down_proj", "o_proj"]},
    "LoRA of experts": {
        "target_modules": ["o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
ADAPTERS = {
    **{name: ("LoraConfig", {"r": 4, "target_modules": LINEAR, **x}) for name, x in LORAS.items()},
    "LoHa": ("LoHaConfig", {"r": 4, "target_modules": ["q_proj", "up_proj"]}),
    "LoKr": ("LoKrConfig", {"r": 4, "target_modules": ["q_proj", "up_proj"]}),
    "OFT": ("OFTConfig", {"oft_block_size": 8, "r": 0, "target_modules": ["q_proj", "up_proj"]}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "VeRA": ("VeraConfig", {"r": 4, "target_modules": ["q_proj", "up_proj"]}),
    "AdaLoRA": ("AdaLoraConfig", {"target_modules": ["q_proj", "up_proj"], "total_step": 9}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 9, "target_modules": ["q_proj", "up_proj"]}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    **PROMPTS,
}  # fmt: skip
MASKS = (
    'with `skip=["lora"]`; otherwise the adapters draw masks of their own: [LoRA](training.md#lora)'
)
LIVE = ("lora_B", "hada_w2_a", "lokr_w2", "oft_R", "ia3", "vera_lambda", "lora_E", "lora_bias")


def adapted(s, name, model=None, adapter="default"):
    """A model with an adapter that changes something, as a freshly made one does not."""
    peft = pytest.importorskip("peft")
    kind, options = ADAPTERS[name]
    config = getattr(peft, kind)(**options, **WORDS)
    torch.manual_seed(5)
    if model is None:
        model = peft.get_peft_model(s.make(), config)
    else:
        model.add_adapter(adapter, config)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if any(part in n for part in LIVE) and p.is_floating_point():
                p.add_((torch.randn(p.shape, generator=draw) * 0.2).to(p))
    return model.eval()


def step(model, s):
    torch.manual_seed(9)
    out = model(s.ids(), labels=s.ids(seed=1))
    out.loss.backward()
    return {"loss": out.loss, "logits": out.logits, "gradient": gradients_of(model)}


def adapter(name):
    own = {"skip": ["lora"]} if "dropout" in name else {}

    @use(f"{name}: a step of training", needs=("peft",), note=MASKS if own else "")
    def trained(s):
        return step(s.serve(adapted(s, name).train(), **own), s)

    @use(f"{name}: generate", needs=("peft",))
    def generated(s):
        return generate(s, s.serve(adapted(s, name)))

    @use(f"{name}: generate, static cache", needs=("peft",))
    def on_static(s):
        return generate(s, s.serve(adapted(s, name)), cache_implementation="static")

    @use(f"{name}: generate, CUDA graphs", needs=("peft",), graphs=True)
    def graphed(s):
        model = s.serve(adapted(s, name), cuda_graphs=True)
        return [generate(s, model), generate(s, model, kept=False)]


for _name in ADAPTERS:
    adapter(_name)


def switched(name, do):
    @use(f"LoRA: {name}", needs=("peft",))
    def plainly(s):
        return do(s, s.serve(adapted(s, "LoRA")))

    @use(f"LoRA: {name}, CUDA graphs", needs=("peft",), graphs=True)
    def graphed(s):
        model = s.serve(adapted(s, "LoRA"), cuda_graphs=True)
        before = generate(s, model, kept=False)
        return [before, do(s, model), generate(s, model, kept=False)]


def logits(s, model):
    with torch.no_grad():
        return model(s.ids()).logits


def disabled(s, model):
    with model.disable_adapter():
        off = [logits(s, model), generate(s, model, kept=False)]
    return [off, logits(s, model)]


def merged(s, model):
    model.merge_adapter()
    found = [logits(s, model), generate(s, model, kept=False)]
    model.unmerge_adapter()
    return [found, logits(s, model)]


def unloaded(s, model):
    other = model.merge_and_unload()
    return [logits(s, other), generate(s, other, kept=False)]


def second(s, model):
    adapted(s, "LoRA of MLPs", model, "other")
    found = []
    for name in ("other", "default"):
        model.set_adapter(name)
        found += [logits(s, model), generate(s, model, kept=False)]
    model.delete_adapter("other")
    return [found, logits(s, model)]


def each_row(s, model):
    adapted(s, "LoRA of MLPs", model, "other")
    names = ["other", "__base__"]
    with torch.no_grad():
        found = model(s.ids(), adapter_names=names).logits
    return [found, generate(s, model, adapter_names=names, new=12)]


def combined(s, model):
    adapted(s, "LoRA, rslora", model, "other")
    model.add_weighted_adapter(["default", "other"], [0.7, 0.4], "sum", combination_type="cat")
    model.set_adapter("sum")
    return logits(s, model)


def loaded(s, model):
    model.save_pretrained(s.folder / "adapter")
    model.load_adapter(s.folder / "adapter", "again")
    model.set_adapter("again")
    return [logits(s, model), generate(s, model, kept=False)]


switched("disabled", disabled)
switched("merged and back", merged)
switched("merged for good", unloaded)
switched("a second adapter", second)
switched("an adapter for each row", each_row)
switched("a sum of adapters", combined)
switched("saved and loaded", loaded)


@use("LoRA: added afterwards", needs=("peft",))
def added(s):
    import peft

    model = s.served()
    first = logits(s, model)
    config = peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False, **WORDS)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config)
    return [first, logits(s, model), step(model.train(), s)]


@use("LoRA: added to the model itself", needs=("peft",))
def injected(s):
    import peft

    model = s.served(cuda_graphs=True)
    first = generate(s, model, kept=False)
    config = peft.LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False, **WORDS)
    torch.manual_seed(5)
    model.add_adapter(config)
    return [first, logits(s, model), generate(s, model, kept=False)]


@use("LoRA: a deepcopy", needs=("peft",))
def copied(s):
    model = copy.deepcopy(s.serve(adapted(s, "LoRA")))
    return [type(model).__name__, logits(s, model), step(model.train(), s)]


@use("LoRA: checkpointing", needs=("peft",))
def checkpointing(s):
    model = s.serve(adapted(s, "LoRA").train())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return step(model, s)


@use("LoRA: autocast", needs=("peft",), rough=True)
def autocast(s):
    model = s.serve(adapted(s, "LoRA").train())
    with torch.autocast(s.device, torch.bfloat16):
        out = model(s.ids(), labels=s.ids(seed=1))
    return out.loss


@use("LoRA: torch.compile", needs=("peft",), slow=True)
def compiled(s):
    torch.compiler.reset()
    run = torch.compile(s.serve(adapted(s, "LoRA")), backend="eager")
    with torch.no_grad():
        return run(s.ids(), use_cache=False).logits


@use("prefix tuning: beams", needs=("peft",))
def prefix_beams(s):
    return generate(s, s.serve(adapted(s, "prefix tuning")), num_beams=2)


@use("prompt tuning: padding, CUDA graphs", needs=("peft",), graphs=True)
def prompt_padding(s):
    model = s.serve(adapted(s, "prompt tuning"), cuda_graphs=True)
    mask = torch.ones_like(s.ids())
    mask[0, :3] = 0
    return generate(s, model, attention_mask=mask, kept=False)
