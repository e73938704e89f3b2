"""Outputs that are made anew for replays."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from conftest import submodule

output = submodule("decoding.output")


class Cache:
    pass


def outputs(cache):
    found = {
        "dict": {"logits": torch.zeros(2), "past_key_values": cache, "last": 1},
        "ordered": OrderedDict(past_key_values=cache, logits=torch.zeros(2)),
    }
    outs = pytest.importorskip("transformers.modeling_outputs")
    kinds = outs.CausalLMOutputWithPast, outs.MoeCausalLMOutputWithPast
    found.update({k.__name__: k(logits=torch.zeros(2), past_key_values=cache) for k in kinds})
    return found


@pytest.mark.parametrize("name", outputs(None))
def test_as_the_model_returned_it(name):
    cache, other = Cache(), Cache()
    out, expected = outputs(cache)[name], outputs(other)[name]
    made = output.Output(out, cache).around(other)
    assert type(made) is type(out)
    assert list(made) == list(out) and made["past_key_values"] is other
    assert all(made[n] is (other if x is cache else x) for n, x in out.items())
    assert list(getattr(made, "__dict__", {})) == list(getattr(expected, "__dict__", {}))
    if hasattr(out, "to_tuple"):
        assert made.past_key_values is other and made.logits is made[0] is out.logits
        assert len(made.to_tuple()) == len(expected.to_tuple()) and made.loss is None
        made.logits = torch.ones(2)
        assert made["logits"] is made.logits is not out.logits


def test_no_cache_is_kept():
    cache = Cache()
    kept = [output.Output(out, cache) for out in outputs(cache).values()]
    reference = weakref.ref(cache)
    del cache
    gc.collect()
    assert kept and reference() is None


def test_an_output_without_the_cache():
    for out in ((1, 2), {"logits": 1}, {"past_key_values": Cache()}):
        with pytest.raises(RuntimeError, match="without its cache"):
            output.Output(out, Cache())
