"""The decode kernel against the token recurrence in fp64, and what it promises of states."""

import pytest
import torch
from conftest import (
    assert_close,
    captured,
    computed,
    gdn_inputs,
    prepared,
    relative_error,
    submodule,
)
from interpreter import INTERPRETING, compiled, interpreted, test_in_the_interpreter  # noqa: F401

reference, calls = submodule("gdn.reference.recurrent"), submodule("gdn.call")

# states are kept and summed in fp32: what is left is their own rounding
STATE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def arguments(
    B, T, H, HV, K, V, dtype=torch.float32, device="cpu", *, raw=False, cu=None, v_first=False,
    l2norm=True, read=None, write=None, pool=0, state=torch.float32, final=True, inplace=False,
    all_states=False, accepted=None, null=-1, out=None, gates="slow", seed=0,
):  # fmt: skip
    """Fields of a RecurrentCall by name; raw says that gates come before their functions."""
    x = gdn_inputs(B, T, H, HV, K, V, dtype, device, seed, gates)
    random = torch.Generator(device=device).manual_seed(seed + 1)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device=device)

    N = B if cu is None else len(cu) - 1
    rows = normal(pool or N, HV, K, V) * 0.2

    def indices(values):
        return None if values is None else torch.tensor(values, device=device)

    return {
        **{name: x[name] for name in ("q", "k", "v")},
        "g": normal(B, T, HV).to(dtype) if raw else x["g"],
        "beta": normal(B, T, HV).to(dtype) if raw else x["beta"],
        "A_log": normal(HV) if raw else None,
        "dt_bias": normal(HV) if raw else None,
        "initial_state": (rows.mT.contiguous() if v_first else rows).to(state),
        "state_indices": indices(read),
        "output_state_indices": indices(write),
        "num_accepted_tokens": indices(accepted),
        "cu_seqlens": None if cu is None else indices(cu).int(),
        "out": out,
        "scale": K**-0.5,
        "use_qk_l2norm": l2norm,
        "use_beta_sigmoid": raw,
        "allow_neg_eigval": raw,
        "state_v_first": v_first,
        "output_final_state": final,
        "inplace": inplace,
        "all_states": all_states,
        "null_index": null,
    }


def wide(x):
    """The arguments in fp64, with a state of their own."""
    return {
        name: y.double() if torch.is_tensor(y) and y.is_floating_point() else y
        for name, y in x.items()
    }


def call(x):
    """The RecurrentCall of fields and options by name."""
    given = calls.RecurrentOptions._fields
    options = calls.RecurrentOptions(**{name: x[name] for name in given if name in x})
    tensors = {name: y for name, y in x.items() if name not in given}
    return calls.RecurrentCall(**tensors, options=options)


def run(x):
    """The kernels' o and states."""
    return computed("gdn.portable.recurrent", "gdn_recurrent_fwd", call(x))


def poisoned(*shapes, dtype, device):
    """Leaves freed memory full of NaN behind, for the allocator to hand out again."""
    stale = [torch.full(s, float("nan"), dtype=dtype, device=device) for s in shapes]
    del stale


def check(x):
    """The kernel's output and states are the reference's; returns them."""
    ref_o, ref_state = reference.gdn_recurrent_fwd(call(wide(x)))
    for tensor, dtype in ((x["v"], x["q"].dtype), (ref_state, torch.float32)):
        poisoned(tensor.shape, dtype=dtype, device=tensor.device)
    o, state = run(x)
    assert o.dtype == x["q"].dtype
    assert_close(o, ref_o)
    assert (state is None) == (ref_state is None)
    if state is not None:
        assert relative_error(state, ref_state) < STATE[state.dtype]
    return o, state


@pytest.fixture(params=[False, True], ids=["kv", "vk"])
def v_first(request):
    return request.param


DTYPES = [torch.float32, torch.float16] if INTERPRETING else [torch.float32, torch.bfloat16]
STATES = [torch.float32, torch.float16] if INTERPRETING else [torch.float32, torch.bfloat16]

# (B, T, H, HV, K, V): one token and several; grouped heads; head dims that fill no tile
SHAPES = [(2, 1, 1, 2, 32, 32), (1, 2, 2, 4, 24, 40), (1, 1, 1, 1, 16, 8)]
if not INTERPRETING:
    SHAPES += [(5, 1, 4, 16, 128, 128), (2, 7, 2, 4, 256, 64), (2, 1, 1, 1, 60, 100)]


class Kernel:
    """Run twice: under the interpreter on the CPU, and compiled on a GPU."""

    device = "cpu"

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("raw", [False, True], ids=["ready", "raw"])
    def test_right(self, shape, dtype, raw, v_first):
        check(arguments(*shape, dtype, self.device, raw=raw, v_first=v_first))

    @pytest.mark.parametrize("T", [0, 1, 3])
    @pytest.mark.parametrize("apart", [False, True])
    def test_a_function_for_all_calls_alike(self, T, apart):
        """Prepared for one call, it computes another one's values; tokens may lie apart."""
        made = []
        for seed in range(2):
            x = arguments(2, T, 1, 2, 16, 24, device=self.device, raw=True, seed=seed)
            for name in ("q", "v", "beta") if apart else ():
                wider = x[name].new_zeros(2, 2 * T + 1, *x[name].shape[2:])
                wider[:, 1::2] = x[name]
                x[name] = wider[:, 1::2]
            made.append(call(x))
        function = submodule("gdn.portable.recurrent").prepare_gdn_recurrent_fwd(made[0])
        o, state = function(*made[1].tensors)
        want = computed("gdn.portable.recurrent", "gdn_recurrent_fwd", made[1])
        ref, ref_state = reference.gdn_recurrent_fwd(made[1])
        assert torch.equal(o, want[0]) and torch.equal(state, want[1])
        assert relative_error(state, ref_state) < 2e-6
        if T:
            assert_close(o, ref)

    @pytest.mark.parametrize("state", STATES, ids=str)
    @pytest.mark.parametrize("T", [1, 3])
    def test_in_place(self, state, T, v_first):
        options = {"state": state, "inplace": True, "v_first": v_first, "raw": True}
        x = arguments(2, T, 1, 2, 16, 32, DTYPES[1], self.device, **options)
        _, after = check(x)
        assert after is x["initial_state"]

    @pytest.mark.parametrize("gates", ["qwen", "none", "extreme"])
    def test_gates(self, gates, v_first):
        check(arguments(2, 1, 1, 2, 16, 16, device=self.device, gates=gates, v_first=v_first))
        check(arguments(1, 5, 1, 1, 16, 16, device=self.device, gates=gates, v_first=v_first))

    def test_packed(self, v_first):
        cu = [0, 0, 3, 3, 4, 9, 9]  # empty sequences first, last and in between, and one token
        x = arguments(1, 9, 1, 2, 16, 16, device=self.device, cu=cu, v_first=v_first, raw=True)
        o, state = check(x)
        options = {"device": self.device, "v_first": v_first, "raw": True}
        for n, (a, b) in enumerate(zip(cu, cu[1:])):  # alone it gives the same bits
            alone = arguments(1, 9, 1, 2, 16, 16, **options)
            for name in ("q", "k", "v", "g", "beta"):
                alone[name] = x[name][:, a:b].clone()
            for name in ("A_log", "dt_bias"):
                alone[name] = x[name]
            alone["initial_state"] = x["initial_state"][n : n + 1].clone()
            alone["cu_seqlens"] = torch.tensor([0, b - a], device=self.device)
            mine, after = run(alone)
            assert torch.equal(mine, o[:, a:b])
            assert torch.equal(after[0], state[n])

    @pytest.mark.parametrize("T", [1, 2])
    @pytest.mark.parametrize("write", [None, [1, -1, 2, 5]], ids=str)
    def test_pool(self, T, write, v_first):
        """A skipped row gives zeros, and nothing but the rows named is touched, bit for bit."""
        read = [3, -1, 0, 6]
        options = {"read": read, "write": write, "pool": 8, "inplace": True, "v_first": v_first}
        x = arguments(4, T, 1, 2, 16, 16, device=self.device, raw=True, **options)
        x["q"][1] = float("nan")  # what a padding row holds may be anything
        before = x["initial_state"].clone()
        ref = wide(x)
        ref["q"][1] = 0.0
        ref_o, ref_pool = reference.gdn_recurrent_fwd(call(ref))
        o, pool = run(x)
        assert pool is x["initial_state"]
        assert_close(o, ref_o)
        assert torch.equal(o[1], torch.zeros_like(o[1]))
        assert relative_error(pool, ref_pool) < 2e-6
        named = [r for r in (read if write is None else write) if r >= 0]
        others = [r for r in range(8) if r not in named]
        assert torch.equal(pool[others], before[others])

    @pytest.mark.parametrize("T", [1, 2])
    @pytest.mark.parametrize(
        "layout", ["other layers", "padded heads", "padded rows", "heads first", "rows first"]
    )
    def test_pool_of_any_layout(self, T, layout, v_first):
        """States of a pool, heads of a state, and rows of a head may be apart and in any order."""
        options = {"read": [2, -1, 1], "pool": 4, "inplace": True, "v_first": v_first, "raw": True}
        x = arguments(3, T, 1, 2, 16, 24, device=self.device, **options)
        before = x["initial_state"]
        P, HV, R, C = before.shape
        wider, pool = {
            "other layers": ((P, 3, HV, R, C), lambda y: y[:, 1]),
            "padded heads": ((P, 3, R, C), lambda y: y[:, :2]),
            "padded rows": ((P, HV, R, 32), lambda y: y[..., :C]),
            "heads first": ((HV, P, R, C), lambda y: y.transpose(0, 1)),
            "rows first": ((R, P, HV, C), lambda y: y.permute(1, 2, 0, 3)),
        }[layout]
        wider = torch.full(wider, 7.0, device=self.device)
        x["initial_state"] = pool(wider).copy_(before)
        assert not x["initial_state"].is_contiguous()
        _, found = check(x)
        assert found is x["initial_state"]
        assert torch.equal(found[[0, 3]], before[[0, 3]])
        found.fill_(7.0)
        assert (wider == 7.0).all()

    @pytest.mark.parametrize("state", STATES, ids=str)
    @pytest.mark.parametrize("dense", [True, False])
    def test_cleared_rows(self, dense, state):
        """Rows that are to be cleared, and no others."""
        wider = torch.full((7, 3, 40, 24), 7.0, dtype=state, device=self.device)
        mine = wider if dense else wider[:, 1:].mT[..., 3:]
        rows = torch.tensor([5, -1, 0, 2, 3], device=self.device)
        kept = torch.tensor([False, False, True, False, True], device=self.device)
        expected = wider.clone()
        (expected if dense else expected[:, 1:].mT[..., 3:])[[5, 2]] = 0.0
        prepared("gdn.portable.pool", "gdn_clear_rows", calls.ClearRows, mine, rows, kept)
        assert torch.equal(wider, expected)

    def test_pool_that_no_kernel_reaches(self):
        """Columns apart, rows that share memory: the reference's."""
        prepare = submodule("gdn.portable.recurrent").prepare_gdn_recurrent_fwd
        x = arguments(2, 1, 1, 2, 16, 16, device=self.device, read=[1, 2], pool=4, inplace=True)
        assert prepare(call(x)) is not None
        pool = x["initial_state"]
        for wrong in (pool.mT, pool[:, :, :1].expand(-1, -1, 16, -1), pool[:, :1].expand_as(pool)):
            assert prepare(call({**x, "initial_state": wrong})) is None

    @pytest.mark.parametrize("T", [1, 2])
    @pytest.mark.parametrize("write", [None, [1, 5, 2, 0]], ids=str)
    def test_null_row(self, T, write, v_first):
        """If row 0 is the null slot, an index of 0 means what a negative one means otherwise."""
        options = {"pool": 8, "inplace": True, "v_first": v_first, "device": self.device}
        nobody = None if write is None else [row or -1 for row in write]
        x = arguments(4, T, 1, 2, 16, 16, read=[3, 0, -1, 6], write=write, null=0, **options)
        y = arguments(4, T, 1, 2, 16, 16, read=[3, -1, -1, 6], write=nobody, **options)
        for inputs in (x, y):
            inputs["q"][1] = float("nan")
            inputs["initial_state"][0] = float("nan")
        ref_o, ref_pool = reference.gdn_recurrent_fwd(call({**wide(x), "q": x["q"].nan_to_num()}))
        o, pool = run(x)
        assert_close(o, ref_o)
        assert relative_error(pool[1:], ref_pool[1:]) < 2e-6
        want, want_pool = run(y)
        assert torch.equal(o, want) and not o[1:3].any()
        assert torch.equal(pool[1:], want_pool[1:]) and pool[0].isnan().all()

    @pytest.mark.parametrize("cu", [None, [0, 2, 2, 5, 6]], ids=str)
    @pytest.mark.parametrize("null", [-1, 0])
    @pytest.mark.parametrize("state", STATES, ids=str)
    def test_drafts(self, cu, null, state, v_first):
        """A row for each token: all rows are written except null slots, and nothing else is."""
        nobody = torch.tensor([[5, 8, 2], [0, 7, 1], [9, 10, 0], [4, 0, 6]]) + null
        rows = nobody.tolist()  # what starts from nobody's row is skipped
        x = arguments(
            4 if cu is None else 1, 3 if cu is None else 6, 1, 2, 16, 24, DTYPES[1], self.device,
            raw=True, cu=cu, read=rows, accepted=[1, 1, 2, 3], pool=12, null=null, state=state,
            inplace=True, v_first=v_first,
        )  # fmt: skip
        wider = torch.stack([x["state_indices"], x["state_indices"]], -1).flatten(1)
        x["state_indices"] = torch.cat([x["state_indices"], wider], 1)[:, :3]  # rows are apart
        before = x["initial_state"].clone()
        _, pool = check(x)
        written = set()
        for n, row in enumerate(rows):
            length = 3 if cu is None else cu[n + 1] - cu[n]
            written |= set() if n == 1 else {each for each in row[:length] if each > null}
        assert written and all(not torch.equal(pool[row], before[row]) for row in written)
        others = [row for row in range(12) if row not in written]
        assert torch.equal(pool[others], before[others])

    def test_rejected_drafts_leave_no_trace(self, v_first):
        """Rounds of drafts of which some are accepted give what those tokens alone give."""
        counts = [[3, 1, 2, 2], [1, 2, 3, 1]]  # accepted of each round, of two sequences
        options = {"device": self.device, "raw": True, "v_first": v_first}
        x = arguments(2, 12, 1, 2, 16, 16, **options, pool=6, inplace=True)
        first = x["initial_state"][[4, 1]].clone()
        rows, last = torch.tensor([[4, 2, 0], [1, 5, 3]], device=self.device), [1, 1]
        outputs = [[], []]
        for i in range(4):
            now = {**x, "state_indices": rows}
            now["num_accepted_tokens"] = torch.tensor(last, device=self.device)
            for name in ("q", "k", "v", "g", "beta"):
                now[name] = x[name][:, 3 * i : 3 * i + 3]
            o, _ = run(now)
            last = [counts[n][i] for n in range(2)]
            for n in range(2):
                outputs[n].append(o[n, : last[n]])
        for n in range(2):
            at = [3 * i + t for i in range(4) for t in range(counts[n][i])]
            alone = {**x, "initial_state": first[n : n + 1], "inplace": False}
            for name in ("q", "k", "v", "g", "beta"):
                alone[name] = x[name][n : n + 1, at]
            ref_o, ref_state = reference.gdn_recurrent_fwd(call(wide(alone)))
            assert relative_error(torch.cat(outputs[n]), ref_o[0]) < 1e-6
            kept = x["initial_state"][rows[n, last[n] - 1]]
            assert relative_error(kept, ref_state[0]) < 1e-6

    @pytest.mark.parametrize("T", [1, 2])
    @pytest.mark.parametrize("dense", [True, False])
    def test_out(self, T, dense, v_first):
        """o goes where it is wanted, and nothing beside it is written."""
        x = arguments(2, T, 1, 2, 16, 16, DTYPES[1], self.device, v_first=v_first)
        o, state = run(x)
        room = torch.full((2, T + 1, 3, 16), 7.0, dtype=o.dtype, device=self.device)
        x["out"] = torch.full_like(o, float("nan")) if dense else room[:, 1:, :2]
        mine, after = run(x)
        assert mine is x["out"] and torch.equal(mine, o) and torch.equal(after, state)
        room[:, 1:, :2] = 7.0
        assert (room == 7.0).all()

    @pytest.mark.parametrize("T", [1, 3] if INTERPRETING else [1, 3, 8])
    def test_every_state(self, T, v_first):
        """Verifying drafts: the state after token n is that of a call that stopped there."""
        options = {"v_first": v_first, "raw": True}
        x = arguments(2, T, 1, 2, 16, 16, device=self.device, all_states=True, **options)
        _, states = check(x)
        for n in (1, T):
            part = {**x, "all_states": False}
            for name in ("q", "k", "v", "g", "beta"):
                part[name] = x[name][:, :n]
            _, state = run(part)
            assert relative_error(states[:, n - 1], state) < 1e-6

    @pytest.mark.parametrize("T", [1, 3])
    def test_repeatable_and_batch_invariant(self, T, v_first):
        big = (64, T, 4, 16, 128, 128) if self.device == "cuda" else (3, T, 1, 1, 16, 16)
        x = arguments(*big, DTYPES[1], self.device, v_first=v_first, raw=True)
        o, state = run(x)
        again = run(x)
        assert torch.equal(o, again[0]) and torch.equal(state, again[1])
        one = {
            name: y[2:3] if torch.is_tensor(y) and y.ndim > 1 else y for name, y in x.items()
        }  # the third row alone
        mine, after = run(one)
        assert torch.equal(mine[0], o[2]) and torch.equal(after[0], state[2])


@interpreted
class TestInterpreted(Kernel):
    pass


@compiled
@pytest.mark.gpu
class TestCompiled(Kernel):
    device = "cuda"

    def test_graph(self):
        """A captured step goes on from the state where it was left."""
        x = arguments(4, 1, 2, 4, 64, 64, torch.bfloat16, "cuda", raw=True, inplace=True)
        twin = {**x, "initial_state": x["initial_state"].clone()}
        for _ in range(3):
            run(twin)
        first = {**x, "initial_state": x["initial_state"].clone()}
        run(first)  # compiles
        graph, (o, state) = captured(run, x)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(state, twin["initial_state"])

    def test_large_pool(self):
        """Rows past 2^31 elements."""
        rows = 2**31 // (32 * 128 * 128) + 8
        x = arguments(1, 1, 16, 32, 128, 128, torch.bfloat16, "cuda", raw=True, inplace=True)
        pool = torch.zeros(rows, 32, 128, 128, dtype=torch.bfloat16, device="cuda")
        pool[-2] = x["initial_state"][0]
        x["initial_state"] = pool[-2:-1].float()
        ref_o, ref_state = reference.gdn_recurrent_fwd(call(wide(x)))
        x["initial_state"] = pool
        x["state_indices"] = torch.tensor([rows - 2], device="cuda", dtype=torch.int32)
        o, _ = run(x)
        assert_close(o, ref_o)
        assert relative_error(pool[-2], ref_state[0]) < STATE[torch.bfloat16]
