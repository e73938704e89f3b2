"""What holds for every public function in each of its forms (tests/problems.py): values and
gradients beside fp64, sizes of zero and one, strides, repeats, what torch does around a call; that
results are in memory of their own, and that operators say what they do."""

import contextlib

import pytest
import torch
from conftest import DEVICES, submodule
from problems import F64, FORMS, PROBLEMS
from uses_functions import FUNCTION_USES, Call, difference, outcome_of, total

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY = {**PROBLEMS, **FORMS}
every_problem = pytest.mark.parametrize("name", EVERY)
# of forms, uses that begin with what is not the function's: threads, and modes that watch it
PROBLEMS_ALONE = ("four threads", "fake tensors", "a CUDA graph", "a counter of operations",
                  "detect_anomaly", "tensors of inference_mode afterwards")  # fmt: skip
_FRAGMENTS = (
    "chunk_gated_delta_rule, fragments",
    "chunk_kda, fragments",
    "causal_conv1d_fn, fragments",
)
REFUSED = {  # by a use, what has no answer in it
    "no rows": _FRAGMENTS,
    "no rows, gradient of a sum": _FRAGMENTS,
    "torch.func.grad": _FRAGMENTS,
    "no tokens": ("fused_recurrent_gated_delta_rule, drafts", "fused_recurrent_kda, drafts"),
    "autocast": ("fused_recurrent_gated_delta_rule, out", "fused_recurrent_kda, out"),
    "torch.func.vmap": ("chunk_gated_delta_rule, pool that is read", *_FRAGMENTS),
    "a CUDA graph": ("chunk_gated_delta_rule, packed", "chunk_kda, packed"),
}
UNLIKE = {  # by a use, what it does not ask for
    "one tensor in several places": ("chunk_kda, checkpoints",),  # keys of any length diverge
    "second derivatives": ("fused_qk_norm_rope, plain",),  # which turns nothing
    # more tokens are taken by more warps, whose sums have another order
    "a row alone, bit for bit": ("fused_qk_norm_rope, pairs", "fused_qk_norm_rope, norms"),
}


@every_problem
@pytest.mark.parametrize("device", DEVICES)
def test_uses(name, device):
    """tests/crossings/uses_functions.py; equal to the function in fp64, or refused as the page of
    crossings says."""
    import table

    wrong = []
    for use, run in FUNCTION_USES.items():
        if run.slow or not run.only(EVERY[name]) or name in UNLIKE.get(use, ()):
            continue
        if name in FORMS and use in PROBLEMS_ALONE:
            continue
        found = outcome_of(run, name, torch.float32, device)
        said = table.outcomes().get(f"{name}: {use}", "equal")
        if name in REFUSED.get(use, ()) and table.kind(found) == "refuses":
            continue
        if not table.may_be(found, said, device):
            wrong.append(f"{use}: {found}")
    assert not wrong, "\n".join(wrong)


def storages(*values) -> set:
    """Memory of tensors that have some."""
    leaves = torch.utils._pytree.tree_leaves(values)
    leaves = [x for x in leaves if isinstance(x, torch.Tensor) and x.numel()]
    return {x.untyped_storage().data_ptr() for x in leaves}


@every_problem
def test_without_gradients(name):
    """Forms of a CPU for calls without gradients give what the definition gives; no result lies in
    the memory of an argument, which keeps its values unless it is written."""
    call = Call(name, F64, "cpu")
    problem, function = call.problem, call.function
    for sizes in ({}, {"B": 1, "T": 1}, {"B": 2, "T": 0}, {"B": 1}, {"B": 2, "T": 3}):
        if sizes.get("T") == 0 and name in REFUSED["no tokens"]:
            continue
        given, before = call.given(**sizes), call.given(**sizes)
        with torch.set_grad_enabled(sizes.get("B") == 1):
            found = torch.utils._pytree.tree_leaves(function(**given))
        written = [given[n] for n in problem.written]
        results = [x for x in found if x is not None and not any(x is y for y in written)]
        assert not storages(results) & storages(given)
        assert len(storages(results)) == len([x for x in results if x.numel()])
        for n, x in given.items():  # a ring is written
            kept = n in problem.written or not isinstance(x, torch.Tensor)
            assert kept or torch.equal(x, before[n]), n
        if problem.grads:
            leaves = {n: before[n].requires_grad_() for n in problem.grads}
            defined = call({**before, **leaves})
            assert difference(call.values(given), defined, problem, F64) is None


@contextlib.contextmanager
def by_operators(kernels=False):
    """Public functions call operators, whose bodies run the reference or kernels, as traced ones
    do; gives the operators, with the arguments of their first call. kernels: of operators that have
    no reference, too. No call is known: on a GPU those of before are."""
    operation, calls = submodule("runtime.operation").Operation, {}
    needs_grad, launcher = submodule("runtime.ops").needs_grad, operation.launcher

    def first(self, tensors, options):
        given = tensors if self.cast is None else self.cast(*tensors)
        call = self.check(self.kind(*given, options))
        traced = self.op is not None or needs_grad(call)
        return self._traced(call) if traced else self._reference(call)

    def recorded(self, fields):
        copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in fields]
        if self.op is not None:
            calls.setdefault(self.op, copies)
        return launcher(self, fields)

    def has_reference(self, call, grad):
        there = kernels or self.module is not None
        return there and (not grad or self._has_gradient(call))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operation, "find", lambda self, *call: None)
        patch.setattr(operation, "_first", first)
        patch.setattr(operation, "launcher", recorded)
        patch.setattr(operation, "_has_kernels", has_reference)
        yield calls


# plain torch, or operators of kernels alone; and operators that torch's autograd computes, which
# opcheck's modes do not see
PLAIN = ("gated_delta_gate", "fused_swiglu", "fused_swiglu_mlp")
BY_AUTOGRAD = ("linear_loss_bwd", "token_log_probs_bwd")


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
OTHERS = (  # of which the reference computes gradients, or is none
    "chunk_gated_delta_rule, checkpoints", "chunk_kda, checkpoints", "fused_qk_norm_rope, plain",
)  # fmt: skip
MIXED = {name: problem.wide for name, problem in EVERY.items() if "q" in problem.grads}
MIXED["replay_gated_delta_rule"] = ("g", "beta")
MIXED["causal_conv1d_update"] = ("x", "conv_state", "weight", "bias")
MIXED["causal_conv1d_update, packed"] = MIXED["causal_conv1d_update"]


@pytest.mark.parametrize("name", [name for name, wide in MIXED.items() if wide])
def test_one_argument_in_fp64(name):
    """All is computed in fp64 then, and results have the dtypes that they have without it."""
    call = Call(name, torch.float32, "cpu")
    plain = call.values(call.given())
    for wide in MIXED[name]:
        given = call.given()
        if wide not in given:
            continue
        given[wide] = call.wide()[wide]
        found = call.both(given)
        assert difference(found, call.expected_both(), call.problem, torch.float32) is None, wide
        assert wide in ("x", "conv_state") or [x.dtype for x in found[: len(plain)]] == [
            x.dtype for x in plain
        ], wide


LAST = [  # functions whose gradients have no gradient by operators
    "chunk_gated_delta_rule", "chunk_kda", "causal_conv1d_fn", "rms_norm", "rms_norm_gated",
    "fused_experts", "fused_qk_norm_rope", "sigmoid_gate", "silu_mul",
]  # fmt: skip


@every_problem
@pytest.mark.parametrize("device", DEVICES)
def test_operators(name, device):
    """Gradients that are written out are autograd's of the definition; operators and their fakes
    agree with each other."""
    call = Call(name, F64, device)
    expected = call.both(call.given()), call.values(call.given())
    with by_operators():
        found = call.both(call.given()), call.values(call.given())
        alone = [call.gradients(call.given(), names=(n,))[-1] for n in call.problem.grads]
    pairs = [*zip(found, expected)] + [(alone, expected[0][-len(alone) :])] * bool(alone)
    for one, right in pairs:
        assert difference(one, right, call.problem, F64) is None
    if call.problem.grads and call.problem.function in LAST and name not in OTHERS:
        with by_operators(), pytest.raises(NotImplementedError, match="no second derivative"):
            leaves = {n: call.given()[n].requires_grad_() for n in call.problem.grads}
            loss = total(call({**call.given(), **leaves}))
            first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
            sum(x.square().sum() for x in first).backward()
    for call.dtype in (torch.float32, torch.float16):
        with by_operators(device == "cuda") as calls:
            call.both(call.given()), call.values(call.given())
        assert calls or call.problem.function in PLAIN
        for operator, fields in calls.items():
            if not any(x in str(operator) for x in BY_AUTOGRAD):
                torch.library.opcheck(operator, tuple(fields), test_utils=CHECKS)
