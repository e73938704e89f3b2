"""What other libraries do to a model: formats of weights, offloading, processes; and no Triton."""

import copy

import torch
from packed import pack, products
from sides import use
from torch import nn
from two_processes import in_shards
from uses_forward import logits, steps
from uses_generate import generate
from uses_train import step


def every(s, model):
    """A prompt, tokens and what generate gives."""
    return [steps(model, s.ids(), None, 0)[0], generate(s, model, kept=False)]


# ---- formats


def quantised(name, change, **facts):
    @use(f"{name}, before", **facts)
    def before(s):
        model = s.make()
        model = change(model) or model
        return every(s, s.serve(model))

    @use(f"{name}, afterwards", **facts)
    def after(s):
        model = s.served()
        model = change(model) or model
        return every(s, model)

    @use(f"{name}, CUDA graphs", graphs=True, **facts)
    def graphed(s):
        model = s.make()
        model = change(model) or model
        return generate(s, s.serve(model, cuda_graphs=True), kept=False)


def by_torchao(name):
    def change(model):
        import torchao.quantization as q

        q.quantize_(model, getattr(q, name)())

    return change


def by_bitsandbytes(kind, **options):
    def change(model):
        import bitsandbytes as bnb

        for path, part in list(model.named_modules()):
            if type(part) is nn.Linear and "lm_head" not in path:
                sizes = part.in_features, part.out_features, part.bias is not None
                other = getattr(bnb.nn, kind)(*sizes, **options)
                other.load_state_dict(part.state_dict(), strict=False)
                model.set_submodule(path, other.to(part.weight.device))

    return change


def packed(model):
    for module in products(model):
        pack(module)


def dynamically(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


quantised("a tensor class of others", packed)
quantised("quantize_dynamic", dynamically)
quantised("torchao, int8 weights", by_torchao("Int8WeightOnlyConfig"), needs=("torchao",))
quantised(
    "torchao, int8 products", by_torchao("Int8DynamicActivationInt8WeightConfig"),
    needs=("torchao",),
)  # fmt: skip
quantised("bitsandbytes, 8 bits", by_bitsandbytes("Linear8bitLt", has_fp16_weights=False),
          needs=("bitsandbytes",))  # fmt: skip
quantised("bitsandbytes, 4 bits", by_bitsandbytes("Linear4bit"), needs=("bitsandbytes",))


# ---- offloading


def offloaded(name, change, **facts):
    @use(f"{name}, before", needs=("accelerate",), **facts)
    def before(s):
        return every(s, s.serve(change(s, s.make())))

    @use(f"{name}, afterwards", needs=("accelerate",), **facts)
    def after(s):
        return every(s, change(s, s.served()))

    @use(f"{name}, CUDA graphs", needs=("accelerate",), graphs=True, **facts)
    def graphed(s):
        model = s.serve(change(s, s.make()), cuda_graphs=True)
        return generate(s, model, kept=False)


def to_cpu(s, model):
    import accelerate

    return accelerate.cpu_offload(model, execution_device=s.device)


def to_disk(s, model):
    import accelerate

    return accelerate.disk_offload(model, s.folder / "weights", execution_device=s.device)


def by_map(s, model):
    """Half of the layers lie on the disk."""
    import accelerate

    here = 0 if s.device == "cuda" else "cpu"
    places = {"model.embed_tokens": here, "model.layers.0": "disk", "model.layers.1": here}
    places.update({"model.norm": here, "model.rotary_emb": here, "lm_head": here})
    return accelerate.dispatch_model(
        model, places, main_device=here, offload_dir=s.folder / "weights", force_hooks=True
    )


offloaded("weights offloaded to the CPU", to_cpu)
offloaded("weights offloaded to the disk", to_disk)
offloaded("device_map with the disk", by_map)


@use("an offloaded cache", gpus=1)
def offloaded_cache(s):
    return generate(s, s.served(), cache_implementation="offloaded", kept=False)


@use("an offloaded static cache", gpus=1)
def offloaded_static(s):
    return generate(s, s.served(), cache_implementation="offloaded_static", kept=False)


@use("device_map over two GPUs", gpus=2, needs=("accelerate",))
def two_gpus(s):
    import accelerate

    model = s.make()
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    places.update({"model.rotary_emb": 0, "lm_head": 1})
    model = accelerate.dispatch_model(model, places)
    return logits(s.serve(model), s.ids())


@use("moved to another GPU afterwards", gpus=2)
def another_gpu(s):
    model = s.served()
    first = logits(model, s.ids())
    return [first, logits(model.to("cuda:1"), s.ids().to("cuda:1")).to("cuda:0")]


# ---- processes


def mesh():
    by_nccl = torch.distributed.get_backend() == "nccl"
    return torch.distributed.init_device_mesh(
        "cuda" if by_nccl else "cpu", (2,), mesh_dim_names=("all",)
    )


def whole(found: dict) -> dict:
    return {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in found.items()}


def shared(name, change, parts=None, **facts):
    """Half of a batch in each process, or the whole in each with parts of all weights."""

    def run(s, first):
        rank = torch.distributed.get_rank()
        ids = s.ids(4, 9) if parts else s.ids(4, 9).chunk(2)[rank]
        model = s.make(**(parts or {})).train()
        model = change(model) if first else s.serve(model)
        model = s.serve(model) if first else change(model)
        found = step(model, ids, ids)
        del found["logits"]
        return {**found, "gradient": whole(found["gradient"])}

    use(f"{name}, before kernelize", processes=True, **facts)(lambda s: run(s, True))
    use(f"{name}, after kernelize", processes=True, **facts)(lambda s: run(s, False))


def fsdp(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def fsdp_checkpointing(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fsdp(model)


def fsdp_bf16(model):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh(), mp_policy=policy)
    return fully_shard(model, mesh=mesh(), mp_policy=policy)


PARTED = {"num_key_value_heads": 2, "vocab_size": 98}  # sizes that two processes divide


def tensor_parallel(model):
    return in_shards(model, mesh())


def fsdp_lora(model):
    import peft

    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(5)
    return fsdp(peft.inject_adapter_in_model(config, model))


shared("DDP", nn.parallel.DistributedDataParallel)
shared("FSDP2", fsdp)
shared("FSDP2 and checkpointing", fsdp_checkpointing)
shared("FSDP2 in bf16", fsdp_bf16, rough=True)
shared("FSDP2 and LoRA", fsdp_lora)
shared("tensor parallel", tensor_parallel, parts=PARTED)


@use("tensor parallel, generate", processes=True)
def tensor_parallel_generate(s):
    return generate(s, s.serve(tensor_parallel(s.make(**PARTED))), kept=False)


@use("DataParallel")
def data_parallel(s):
    model = s.served()
    with torch.no_grad():
        return nn.DataParallel(model)(s.ids()).logits


@use("replicas")
def replicas(s):
    model = s.served()
    return [logits(copy.copy(model), s.ids()), logits(model, s.ids())]


@use("a Python without Triton", without="triton")
def without_triton(s):
    """A prompt, in another process: pairs.elsewhere."""
