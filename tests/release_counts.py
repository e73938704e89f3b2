"""Prints, as JSON, what kernelize serves in tiny models of the transformers that this process
imports.

    PYTHONPATH=DIR python tests/release_counts.py [TYPE ...]

tools/releases.py runs this for each release. The package's reference stands in for kernels, for any
device and dtype. Each model gives its logits for a prompt, and four greedy tokens after a padded
one with theirs, before and after kernelize. Printed are, by type, what is served by kind, what is
left alone and why, and what is wrong: other numbers, or a kind that is served and has not computed.
And why each token of generate waits for the host, if so.
"""

import json
import sys
import warnings
from typing import Dict, List, NamedTuple, Optional

import torch
from conftest import load_package, submodule
from sweep_models import LOGITS, callable_model, difference
from tiny_models import CONFIGS, KDA, MORE, random_model, randomise, tokens

TYPES = [
    *CONFIGS, *MORE, *KDA, "apertus", "arcee", "aria_text", "cohere", "cwm", "deepseek_v3",
    "exaone4", "flex_olmo", "gemma", "gemma3_text", "glm4", "glm4_moe", "glm4v_text", "gpt_oss",
    "granitemoe", "granitemoehybrid", "helium", "hy_v3", "lfm2", "minimax", "minimax_m2",
    "mixtral", "mt5", "olmo3", "olmoe", "phimoe", "pixtral", "qwen2_moe", "qwen3_moe",
    "qwen3_vl_text", "smollm3", "solar_open", "t5gemma",
]  # fmt: skip
BY_TINY_MODELS = {*CONFIGS, *MORE, *KDA, "glm4v_text"}
# operations of which one at least runs where a module of a kind is served
RUNS = {
    "mlp": ("swiglu", "silu_mul"), "norm": ("rms_norm",),
    "attention": ("qk_norm_rope", "latent_attention"),
    "layer": ("rms_norm",), "gdn": ("gdn_",), "kda": ("kda_",), "experts": ("experts",),
    "router": ("topk",), "block": ("shared",),
}  # fmt: skip
NEW_TOKENS = 4


class Result(NamedTuple):
    served: Dict[str, int]  # modules by kind
    left: Dict[str, List[str]]  # by kind: the class of each module that is left alone, and why
    wrong: Optional[str] = None


def served_everywhere():
    """The package, with kernels that are said to be there for any device and dtype."""
    for name in ("experts", "moe_blocks"):
        module = submodule(f"models.{name}")
        module.why_not_on = lambda *_: None
        module.HALF = (torch.float16, torch.bfloat16, torch.float32)
    return load_package()


def model_and_inputs(kind: str):
    """A tiny model in evaluation mode, and what it can be called with."""
    if kind in BY_TINY_MODELS:
        return random_model(kind), {"input_ids": tokens(2, 9)}
    model, inputs, _ = callable_model(kind)
    if inputs is None:
        raise ValueError("it cannot be called with tokens or pixels")
    return randomise(model), inputs


def outputs_of(model, inputs: dict) -> dict:
    """Outputs of the model by phase: for a prompt, and for tokens after a padded prompt."""
    out = model(**inputs)
    phases = {"a prompt": [out["logits"] if "logits" in out else out["last_hidden_state"]]}
    if "input_ids" in inputs and model.can_generate():
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[0, :3] = 0
        found = model.generate(
            inputs["input_ids"], attention_mask=mask, do_sample=False, output_logits=True,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True,
        )  # fmt: skip
        phases["tokens after a padded prompt"] = [*found.logits, found.sequences]
    return phases


def why_wrong(model, inputs: dict, expected: dict, kinds) -> Optional[str]:
    """Describes the difference of the served model's outputs from the expected ones, or returns
    None."""
    with submodule("runtime.dispatch").served() as record:
        found = outputs_of(model, inputs)
    for phase in expected:
        worst = max(map(difference, found[phase], expected[phase]))
        if not worst <= LOGITS:
            return f"{phase}: differs by {worst:.1e} of the largest"
    for kind in kinds:
        if not any(operation.startswith(RUNS[kind]) for operation in record):
            return f"what is served as {kind} has not computed"
    return None


def look_at(kind: str) -> Result:
    """A type before and after kernelize."""
    kind_of = submodule("models.report").kind_of
    model, inputs = model_and_inputs(kind)
    with torch.no_grad(), submodule("runtime.dispatch").force("reference"):
        expected = outputs_of(model, inputs)
        report = load_package().kernelize(model, skip=["loss"])  # which no call here computes
        served, left = {}, {}
        for row in report.served:
            served[kind_of(row)] = served.get(kind_of(row), 0) + 1
        for row in report.left:
            left.setdefault(kind_of(row), []).append(f"{row.kind}: {row.reason}")
        wrong = why_wrong(model, inputs, expected, served)
    return Result(dict(sorted(served.items())), left, wrong)


def survey(kinds: List[str]) -> dict:
    """The release and, by type, its Result; of one that cannot be made or called, why not. A type
    that the release has not is left out."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    served_everywhere()
    found = {}
    for kind in kinds:
        if kind in CONFIG_MAPPING:
            try:
                found[kind] = look_at(kind)._asdict()
            except Exception as error:
                found[kind] = Result({}, {}, f"{type(error).__name__}: {error}"[:300])._asdict()
    waits = submodule("decoding.late").why_not_late(transformers.LlamaForCausalLM)
    return {"transformers": transformers.__version__, "types": found, "waits": waits}


if __name__ == "__main__":
    print(json.dumps(survey(sys.argv[1:] or TYPES)))
