"""Drafts in a real text: how many are right, and what a token then takes.

    python benchmarks/drafts_of_text.py [--steps 400]

The byte-level hybrid of examples/train_bytes.py is trained on the sources of Python's standard
library but for the last of them, and an MTP layer for it, which predicts one byte further from the
model's hidden states. Every second part of 480 bytes is there twice: so little text does not teach
to repeat otherwise. Both then go on with texts from the last sources: one that repeats its prompt,
as an edit does (the text, and its beginning once more), and one that nothing repeats. Greedy, bf16,
256 bytes, three texts each: the median of what a token takes with `cuda_graphs=True`, by calls of
256 and of 16 bytes, the tokens that a round gives on average, and the part of the bytes that are
those of the text.
"""

import gc
import statistics
import sys
from functools import partial

import torch
import torch.nn.functional as F
from kernel_time import seconds
from runner import DEVICE, ROOT, run

sys.path.insert(0, str(ROOT / "examples"))
import train_bytes  # noqa: E402

TEXTS, PROMPT, BEGIN, NEW, SHORT = 3, 480, 64, 256, 16
HELD = 200_000  # bytes of the last sources, which are not trained on
LOOKED_UP = (7,)
PREDICTED = (2,)
AGAIN = torch.tensor(list(b"\n\n# again\n"), dtype=torch.uint8)


def repeating(text: torch.Tensor) -> torch.Tensor:
    """The text in parts as long as a prompt, of which every second one is there twice."""
    parts = text[: len(text) // PROMPT * PROMPT].view(-1, PROMPT)
    return torch.cat([y for n, x in enumerate(parts) for y in ((x, AGAIN, x) if n % 2 else (x,))])


def trained(package, text: torch.Tensor, steps: int) -> tuple:
    """The model, and the weights of its MTP layer."""
    sizes = train_bytes.SIZES["cuda" if DEVICE == "cuda" else "cpu"]
    model = train_bytes.random_model(sizes, DEVICE, 0)
    package.kernelize(model, mode="training")
    losses, speed = train_bytes.train(model, text, sizes, DEVICE, steps, 0)
    print(f"{speed:.0f} bytes a second", flush=True)
    model.eval().requires_grad_(False)
    mtp = sys.modules[f"{package.__name__}.decoding.mtp"].Mtp(model, 1).to(DEVICE)
    optimizer = torch.optim.AdamW(mtp.parameters(), lr=1e-3, fused=DEVICE == "cuda")
    found = []
    for _, batch in zip(range(steps), train_bytes.batches(text, sizes, 1)):
        batch = batch.to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            with torch.no_grad():
                hidden = model.model(batch[:, :-2], use_cache=False).last_hidden_state
            places = torch.arange(1, batch.shape[1] - 1, device=DEVICE)[None]
            logits = model.lm_head(mtp(model, batch[:, 1:-1], hidden, places, None))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 2:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    print(f"loss {statistics.mean(losses[-20:]):.3f}, one byte further {found[-1]:.3f}", flush=True)
    weights = {f"mtp.{name}": x.detach() for name, x in mtp.state_dict().items()}
    return model.to(torch.bfloat16 if DEVICE == "cuda" else torch.float32), weights


def prompts(held: torch.Tensor) -> dict:
    """Texts of each kind [1, bytes], with what follows in the text itself."""
    step, long = len(held) // TEXTS, PROMPT + NEW
    held = held.long()[None].to(DEVICE)
    texts = [held[:, n * step : n * step + long] for n in range(TEXTS)]
    again = AGAIN.long()[None].to(DEVICE)
    edits = [
        (torch.cat([x[:, :PROMPT], again, x[:, :BEGIN]], 1), x[:, BEGIN : BEGIN + NEW])
        for x in texts
    ]
    plain = [(x[:, :PROMPT], x[:, PROMPT:]) for x in texts]
    return {"a text that repeats its prompt": edits, "a text that nothing repeats": plain}


def rows(package, options):
    text = train_bytes.corpus()
    model, weights = trained(package, repeating(text[:-HELD]), options.steps)
    package.kernelize(model, cuda_graphs=True)
    loop = sys.modules[f"{package.__name__}.decoding.draft_loop"]
    own, taken = loop.Pace, []

    class Noting(own):
        def note(self, tokens):
            taken.append(tokens)
            super().note(tokens)

    loop.Pace = Noting
    ways = {"without drafts": {}}
    ways.update({f"{n} looked up": {"prompt_lookup_num_tokens": n} for n in LOOKED_UP})
    for n in PREDICTED:
        ways[f"{n} of the MTP layer"] = {"assistant_model": package.load_mtp(model, weights, n)}

    def token_us(ids: torch.Tensor, words: dict, made: list) -> float:
        call = partial(model.generate, ids, do_sample=False, pad_token_id=0, eos_token_id=2**31,
                       cache_implementation="static", **words)  # fmt: skip
        long = seconds(lambda: made.append(call(max_new_tokens=NEW)[:, ids.shape[1] :]))
        count = len(taken)
        short = seconds(partial(call, max_new_tokens=SHORT))
        del taken[count:]
        return (long - short) / (NEW - SHORT) * 1e6

    gc.collect()
    gc.freeze()  # a capture collects garbage, which takes the longer the more objects there are
    for words in ways.values():
        token_us(prompts(text[-HELD:])["a text that repeats its prompt"][0][0], words, [])
    for kind, texts in prompts(text[-HELD:]).items():
        us, rounds, alone, as_text = {}, {}, {}, {}
        for name, words in ways.items():
            taken.clear()
            made: list = []
            us[name] = statistics.median([token_us(ids, words, made) for ids, _ in texts])
            same = [(x == y).float().mean().item() for x, (_, y) in zip(made, texts)]
            as_text[name] = statistics.mean(same)
            if taken:
                rounds[name] = statistics.mean(taken)
                alone[name] = max(0.0, 1 - sum(taken) / (NEW - 1) / len(texts))  # surplus
        yield {"what": kind, "us": us, "tokens_a_round": rounds, "without_a_round": alone,
               "as_the_text": as_text}  # fmt: skip
    loop.Pace = own


ARGUMENTS = {"--steps": {"type": int, "default": 400, "help": "of each training"}}
main = partial(run, __doc__, "generate_drafts_text", rows, ARGUMENTS)

if __name__ == "__main__":
    main()
