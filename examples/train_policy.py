"""Train a policy by GRPO and by DPO with token_log_probs, beside log-probabilities from logits.

    python examples/train_policy.py [--steps 20]
    pip install trl
    python examples/train_policy.py --trl [--steps 20]

A tiny Llama learns to write bytes that are even numbers: by GRPO from groups of answers that it
samples itself, and by DPO from pairs of a good and a bad answer. Each step is taken from the same
weights and on the same tokens in both ways: with the logits of all answers, and with
`token_log_probs` of a kernelized model, which never holds them. Prints the share of even bytes, and
how far the two ways are apart.

With --trl, TRL's GRPOTrainer takes the same steps with its own log-probabilities, and with those of
`token_log_probs`, by a subclass. Prints the losses of both.
"""

import argparse
import copy
import importlib.util
import tempfile

import torch
import torch.nn.functional as F
from parts import byte_tokenizer, default_device, load_kernel, tiny_model

PROMPTS, GROUP, TOKENS = 2, 8, 12  # prompts a step, answers to each, tokens of an answer
BETA, CLIP = 0.1, 0.2


def from_logits(model, ids, start):
    """log p of each token from `start` on [B, T - start], by logits."""
    logits = model(input_ids=ids[:, :-1]).logits[:, start - 1 :].float()
    return logits.log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)


def without_logits(kernel):
    def log_probs(model, ids, start):
        hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[:, start - 1 :]
        return kernel.token_log_probs(hidden, model.lm_head.weight, ids[:, start:])

    return log_probs


def grpo_loss(log_probs, model, ids, start, old, advantage):
    """The clipped objective of PPO, each answer weighed by its advantage over its group."""
    ratio = (log_probs(model, ids, start) - old).exp()
    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, bounded * advantage).mean()


def dpo_loss(log_probs, model, reference, chosen, rejected, start):
    """-log sigmoid of BETA times how much more the policy prefers than its reference does."""
    margins = []
    for ids in (chosen, rejected):
        with torch.no_grad():
            before = log_probs(reference, ids, start).sum(-1)
        margins.append(log_probs(model, ids, start).sum(-1) - before)
    return -F.logsigmoid(BETA * (margins[0] - margins[1])).mean()


def answers(model, device) -> torch.Tensor:
    """Prompts with GROUP sampled answers to each, [PROMPTS * GROUP, 4 + TOKENS]."""
    prompts = torch.randint(256, (PROMPTS, 4), device=device).repeat_interleave(GROUP, 0)
    more = {"do_sample": True, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), **more)


def is_even(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, 4:] % 2 == 0).float().mean(-1)


def run(kernel, device: str, steps: int) -> dict:
    """Shares of even bytes before and after, and the largest difference of losses, by method."""
    ways = {"logits": from_logits, "token_log_probs": without_logits(kernel)}
    found = {}
    for method in ("GRPO", "DPO"):
        torch.manual_seed(0)
        model = tiny_model("llama").to(device).train()
        reference = copy.deepcopy(model).eval()
        kernel.kernelize(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        shares, apart = [], 0.0
        for _ in range(steps):
            ids = answers(model, device)
            shares.append(is_even(ids).mean().item())
            reward = is_even(ids).view(PROMPTS, GROUP)
            if method == "GRPO":
                advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std() + 1e-4)
                with torch.no_grad():
                    old = ways["token_log_probs"](model, ids, 4)
                arguments = (model, ids, 4, old, advantage.view(-1, 1))
                losses = {name: grpo_loss(way, *arguments) for name, way in ways.items()}
            else:
                order = reward.argsort(1)
                rows = ids.view(PROMPTS, GROUP, -1)
                worst, best = (rows[torch.arange(PROMPTS), order[:, i]] for i in (0, -1))
                arguments = (model, reference, best, worst, 4)
                losses = {name: dpo_loss(way, *arguments) for name, way in ways.items()}
            apart = max(apart, abs(losses["logits"] - losses["token_log_probs"]).item())
            optimizer.zero_grad()
            losses["token_log_probs"].backward()
            optimizer.step()
        found[method] = shares[0], shares[-1], apart
    return found


def trainer_of(kernel, base: type) -> type:
    """TRL's GRPOTrainer with log-probabilities and entropies by token_log_probs, for models of
    text. What is overridden is a method of TRL 1.16."""

    class Trainer(base):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size=None,
            compute_entropy=False, **more,
        ):  # fmt: skip
            model = self.accelerator.unwrap_model(model)
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            hidden = model.model(**given).last_hidden_state[:, -logits_to_keep - 1 : -1]
            target = input_ids.masked_fill(attention_mask == 0, -100)[:, -logits_to_keep:]
            how = {"temperature": self.temperature, "entropy": compute_entropy}
            found = kernel.token_log_probs(hidden, model.lm_head.weight, target, **how)
            return (*found, None) if compute_entropy else (found, None, None)

    return Trainer


def run_trl(kernel, device: str, steps: int) -> dict:
    """Losses of GRPO by TRL, with each of the two ways."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def even(completions, **more):
        return [sum(ord(letter) % 2 == 0 for letter in text) / TOKENS for text in completions]

    prompts = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three", "four")])
    ways, found = {"TRL": GRPOTrainer, "token_log_probs": trainer_of(kernel, GRPOTrainer)}, {}
    for name, kind in ways.items():
        model = tiny_model("llama").to(device)
        if name != "TRL":
            kernel.kernelize(model)
        with tempfile.TemporaryDirectory() as folder:
            how = GRPOConfig(
                folder, max_steps=steps, num_generations=GROUP, max_completion_length=TOKENS,
                per_device_train_batch_size=PROMPTS * GROUP, num_iterations=2, learning_rate=3e-3,
                bf16=False, use_cpu=device == "cpu", save_strategy="no", logging_steps=1,
                report_to=[], disable_tqdm=True, seed=0,
            )  # fmt: skip
            more = {"train_dataset": prompts, "processing_class": byte_tokenizer()}
            trainer = kind(model, reward_funcs=even, args=how, **more)
            trainer.train()
        found[name] = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="(default: 20)")
    parser.add_argument("--trl", action="store_true", help="GRPO by TRL's trainer (default: False)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.trl:
        for package in ("trl", "datasets"):
            if importlib.util.find_spec(package) is None:
                parser.error(f"the package {package} is not installed: pip install {package}")
        for name, losses in run_trl(load_kernel(), default_device(), options.steps).items():
            print(f"{name}: losses {' '.join(f'{loss:.4f}' for loss in losses)}")
        return
    for method, (first, last, apart) in run(load_kernel(), default_device(), options.steps).items():
        print(
            f"{method}: even bytes {first:.2f} -> {last:.2f}; losses differ by {apart:.1e} at most"
        )


if __name__ == "__main__":
    main()
