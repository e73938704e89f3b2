"""Decoding with a ring: the reference and the kernels against the token recurrence in fp64, over
many flushes, and what is promised of rings, cursors and rows."""

import copy
import functools

import pytest
import torch
from conftest import TOLERANCE, captured, computed, relative_error, submodule
from interpreter import INTERPRETING, compiled, interpreted, test_in_the_interpreter  # noqa: F401

calls = submodule("gdn.call")
recurrent = submodule("gdn.reference.recurrent")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN = float("nan")
# of states at the end: their own rounding, with which that of u in the ring counts as well
STATE = {F64: 1e-13, F32: 1e-6, F16: 1e-3, BF16: 1e-2}
GATES = {
    "slow": lambda n: torch.nn.functional.logsigmoid(n + 4),
    "qwen": lambda n: -torch.linspace(0.01, 16, n.shape[-1]) * torch.nn.functional.softplus(n + 1),
    "forgetting": lambda n: torch.where(n > 1.3, -900.0, -0.01 * n.abs()),  # all, now and then
    "infinite": lambda n: torch.where(n > 1.3, -torch.inf, -0.01 * n.abs()),
}


def by(kernels: bool, name: str, call):
    """What the kernels, or the reference, give of a call."""
    if kernels:
        return computed("gdn.portable.replay", name, call)
    operations = submodule("gdn.ops_replay")
    named = {x.name: x for x in (operations.REPLAY, operations.ADVANCE, operations.MATERIALISE)}
    return named[name].module(call)


class Decoding:
    """Sequences that are decoded with a ring, and the token recurrence in fp64 beside it."""

    def __init__(
        self, kernels, dtype=F32, state=None, N=3, H=1, HV=2, K=16, V=8, R=8, max_tokens=1,
        rows=None, raw=False, l2norm=True, gates="slow", device="cpu", seed=0, u=None, apart=False,
        null=-1,
    ):  # fmt: skip
        self.kernels, self.dtype, self.device = kernels, dtype, device
        self.N, self.sizes, self.gates = N, (H, HV, K, V), gates
        self.random = torch.Generator().manual_seed(seed)
        self.P = N if rows is None else N + 3
        self.pool = self.normal(self.P, HV, V, K).mul(0.2).to(state or dtype)
        if apart:  # another layer's states lie between
            self.pool = torch.stack([self.pool, self.pool * NAN], 1)[:, 0]
        self.start = self.pool.clone()
        make = submodule("gdn.api_replay").make_ring
        self.ring = make(self.pool, H, dtype, rows=R, max_tokens=max_tokens)
        if u is not None:
            self.ring = self.ring._replace(u=self.ring.u.to(u))
        for x in self.ring[:3]:
            x.fill_(NAN)  # what is not kept may be anything
        self.cursor = torch.zeros(N, 2, dtype=torch.int32, device=device)
        self.rows = None if rows is None else torch.tensor(rows, device=device)
        self.null, self.live = null, [n for n in range(N) if rows is None or rows[n] > null]
        self.at = [n if rows is None else rows[n] for n in self.live]
        self.A_log, self.dt_bias = (self.normal(HV) if raw else None for _ in "ab")
        self.raw, self.l2norm = raw, l2norm
        self.true = self.pool[self.at].double()  # [live, HV, V, K]
        self.errors, self.flushes = [], 0

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random).to(self.device)

    def tokens(self, T=1) -> dict:
        H, HV, K, V = self.sizes
        g = GATES[self.gates](torch.randn(self.N, T, HV, generator=self.random)).to(self.device)
        x = {
            "q": self.normal(self.N, T, H, K),
            "k": torch.nn.functional.normalize(self.normal(self.N, T, H, K), dim=-1),
            "v": self.normal(self.N, T, HV, V),
        }
        x = {name: y.to(self.dtype) for name, y in x.items()}
        x["g"] = self.normal(self.N, T, HV) if self.raw else g
        x["beta"] = self.normal(self.N, T, HV) if self.raw else self.normal(self.N, T, HV).sigmoid()
        x.update(A_log=self.A_log, dt_bias=self.dt_bias)
        exact = ("g", "beta", "A_log", "dt_bias") if self.dtype == F64 else ()
        return {n: y.double() if n in exact and y is not None else y for n, y in x.items()}

    def call(self, x, force=None, out=None):
        options = calls.ReplayOptions(
            x["k"].shape[-1] ** -0.5, self.l2norm, self.raw, self.raw, self.ring.max_tokens,
            self.null,
        )  # fmt: skip
        ring = self.ring[:3]
        return calls.ReplayCall(
            *x.values(), self.pool, *ring, self.cursor, force, self.rows, out, options
        )

    def replay(self, x, force=None, out=None):
        call = self.call(x, force, out)
        return by(self.kernels, "gdn_replay_fwd", call)

    def advance(self, accepted=None, force=None):
        want = self.cursor.clone()
        self.advance_by(False, accepted, force, want)
        self.advance_by(self.kernels, accepted, force, self.cursor)
        assert torch.equal(self.cursor, want)

    def advance_by(self, kernels, accepted, force, cursor):
        options = calls.AdvanceOptions(self.ring.max_tokens, self.null)
        call = calls.RingAdvance(cursor, accepted, force, self.rows, *self.ring[:3], options)
        by(kernels, "gdn_ring_advance", call)

    def materialise(self, inplace=False):
        options = calls.MaterialiseOptions(self.ring.max_tokens, self.null, inplace)
        tensors = (self.pool, *self.ring[:3], self.cursor, self.rows)
        call = calls.RingMaterialise(*tensors, options)
        return by(self.kernels, "gdn_ring_materialise", call)

    def recurrence(self, x):
        """o and the states after every token of the live rows, in fp64."""
        wide = {
            n: None if y is None else y.double()[self.live] if y.ndim > 1 else y.double()
            for n, y in x.items()
        }
        options = calls.RecurrentOptions(
            x["k"].shape[-1] ** -0.5, self.l2norm, self.raw, self.raw, True, all_states=True
        )
        fields = {**wide, "initial_state": self.true, "options": options}
        missing = {name: None for name in calls.RecurrentCall._fields if name not in fields}
        return recurrent.gdn_recurrent_fwd(calls.RecurrentCall(**fields, **missing))

    def step(self, T=1, force=None, accepted=None):
        """Decodes T tokens, of which so many are accepted."""
        x, before = self.tokens(T), self.cursor.clone()
        o = self.replay(x, force)
        want, states = self.recurrence(x)
        assert o.dtype == self.dtype and torch.equal(self.cursor, before)
        self.errors.append(relative_error(o[self.live], want))
        skipped = [n for n in range(self.N) if n not in self.live]
        assert torch.equal(o[skipped], torch.zeros_like(o[skipped]))
        kept = accepted
        if accepted is None:
            kept = torch.full((self.N,), T, device=self.device)
            accepted = None if self.ring.max_tokens == 1 else kept
        self.advance(accepted, force)
        held = torch.cat([self.true[:, None], states], 1)
        self.true = torch.stack([held[i, kept[n]] for i, n in enumerate(self.live)])
        moved = self.cursor[:, 1] < before[:, 1] + kept
        self.flushes += int(moved[self.live].sum())

    def check(self):
        """Compares the outputs so far and the current states, null slots included."""
        state = torch.promote_types(self.pool.dtype, F32) if self.dtype == F64 else self.pool.dtype
        limit = max(TOLERANCE[self.dtype], TOLERANCE[state])
        assert max(self.errors) <= limit, max(self.errors)
        now = self.materialise()
        assert now.dtype == (F64 if state == F64 else F32)
        assert relative_error(now[self.live], self.true) <= STATE[state]
        others = [p for p in range(self.P) if p not in self.at]
        assert torch.equal(self.pool[others], self.start[others])
        assert all(x[others].isnan().all() for x in self.ring[:3])

    def some(self, share=0.2):
        return (torch.rand(self.N, generator=self.random) < share).to(self.device)


ROWS = [4, -1, 2]  # of a pool, out of order
# (H, HV, K, V): grouped heads; head dims that fill no tile
SIZES = [(2, 4, 16, 8), (1, 1, 24, 40)]


class Either:
    """Common interface of reference and kernels."""

    kernels, device = False, "cpu"
    DTYPES = (F64, F32)
    STATES = (BF16, F16)
    STEPS, ROOM = 40, 16
    same = staticmethod(torch.equal)

    def decoding(self, **options):
        return Decoding(self.kernels, **{"device": self.device, "dtype": self.DTYPES[0], **options})

    @pytest.mark.parametrize("dtype", [0, 1], ids=["first", "second"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_one_token(self, dtype, sizes):
        """Staggered: a forced flush of one sequence, and each goes on at its own place."""
        names = dict(zip(("H", "HV", "K", "V"), sizes))
        rows = ROWS if (dtype == 0) == (sizes == SIZES[0]) else None
        x = self.decoding(dtype=self.DTYPES[dtype], rows=rows, R=4, raw=rows is None, **names)
        for t in range(9):
            x.step(force=torch.arange(3, device=self.device) == t)
        assert len(set(x.cursor[x.live, 1].tolist())) > 1 and x.flushes > 4
        x.check()

    @pytest.mark.parametrize("gates", GATES)
    def test_gates(self, gates):
        x = self.decoding(gates=gates, l2norm=gates != "qwen", R=self.ROOM)
        for _ in range(self.STEPS):
            x.step()
        assert x.flushes == x.N * (self.STEPS // self.ROOM)
        x.check()

    @pytest.mark.parametrize("state", [0, 1], ids=["first", "second"])
    @pytest.mark.parametrize("max_tokens", [1, 2])
    def test_states_of_16_bits(self, state, max_tokens):
        options = {"state": self.STATES[state], "max_tokens": max_tokens, "apart": True}
        x = self.decoding(dtype=self.DTYPES[1], rows=ROWS, **options)
        for _ in range(9):
            x.step(force=x.some())
        x.check()

    @pytest.mark.parametrize("T, R", [(3, 8), (2, 5)])
    def test_drafts(self, T, R):
        """Any number of them is accepted, none too; the ring goes around its end."""
        x = self.decoding(max_tokens=T, R=R, rows=ROWS, raw=True)
        for t in range(8):
            now = T if t % 3 else T - 1
            accepted = torch.randint(0, now + 1, (x.N,), generator=x.random).to(self.device)
            x.step(now, x.some(), accepted)
        assert x.flushes > 2 and x.cursor[x.live, 0].any()
        x.check()

    def test_most_tokens(self):
        x = self.decoding(max_tokens=8, R=16, N=1, H=1, HV=2)
        for accepted in (8, 1, 5):
            x.step(8, accepted=torch.tensor([accepted], device=self.device))
        x.check()

    def test_flush_on_demand(self):
        """Flushes in place, for readers of states; decoding then continues with empty rings."""
        x = self.decoding(rows=ROWS)
        for _ in range(3):
            x.step()
        now = x.materialise()
        assert x.materialise(inplace=True) is x.pool
        assert relative_error(x.pool[x.at], now[x.live]) <= STATE[x.pool.dtype]
        x.cursor.zero_()
        for y in x.ring[:3]:
            y.fill_(NAN)
        x.check()
        x.step()
        x.check()

    def test_forced_flush_has_the_token(self):
        """Without drafts what is in the pool afterwards is the state now."""
        x = self.decoding(rows=ROWS)
        for _ in range(3):
            x.step()
        x.step(force=torch.ones(x.N, dtype=torch.bool, device=self.device))
        assert relative_error(x.pool[x.at], x.true) <= STATE[x.pool.dtype]
        assert not x.cursor[x.live].any()

    def test_a_row_that_is_used_again(self):
        x = self.decoding(rows=ROWS)
        for _ in range(3):
            x.step()
        x.pool[x.at[0]], x.cursor[0], x.true[0] = 0.0, 0, 0.0
        for _ in range(3):
            x.step()
        x.check()

    @pytest.mark.parametrize("T", [1, 2])
    def test_bits_depend_on_the_row_alone(self, T):
        many = self.decoding(max_tokens=T, R=6)
        one = self.decoding(max_tokens=T, R=6)
        keep = slice(1, 2)
        one.pool, one.cursor = one.pool[keep], one.cursor[keep]
        one.ring = one.ring._replace(**{n: getattr(one.ring, n)[keep] for n in "kug"})
        kept = None if T == 1 else torch.full((3,), T, device=self.device)
        for _ in range(6):
            force = many.some()
            x = many.tokens(T)
            o = many.replay(x, force)
            mine = {n: None if y is None else y[keep] for n, y in x.items()}
            assert self.same(one.replay(mine, force[keep]), o[keep])
            many.advance(kept, force)
            one.advance(None if kept is None else kept[keep], force[keep])
        assert self.same(one.pool, many.pool[keep]) and torch.equal(one.cursor, many.cursor[keep])
        assert self.same(one.materialise(), many.materialise()[keep])

    def test_poisoned_rows_of_nobody(self):
        """Padding rows of the batch may hold any values."""
        x = self.decoding(rows=ROWS)
        tokens = x.tokens()
        for name in "qkv":
            tokens[name][1] = NAN
        x.pool[[0, 1, 3, 5]] = NAN
        o = x.replay(tokens)
        assert not o[1].any() and o.isfinite().all()

    @pytest.mark.parametrize("T", [1, 2])
    def test_null_rows_and_out(self, T):
        """Row 0 of the pool is the null slot, as in vLLM; o is written to the caller's tensor."""
        x = self.decoding(rows=[4, 0, 2], null=0, max_tokens=T, R=6)
        for _ in range(7):
            x.step(T, x.some())
        x.check()
        y = copy.deepcopy(x)
        tokens = x.tokens(T)
        room = torch.full((3, T, 2, 3, 8), NAN, device=self.device, dtype=x.dtype)
        for out in (room[:, :, :, 1], torch.empty_like(tokens["v"])):
            assert x.replay(tokens, out=out) is out
            assert torch.equal(out, y.replay(tokens)) and not out[1].any()
        assert room[:, :, :, ::2].isnan().all()

    def test_views(self):
        """q, k, v and gates are read where a projection put them."""
        x, y = (self.decoding(max_tokens=2, H=2, HV=4) for _ in "xy")
        tokens = x.tokens(2)
        views = dict(tokens)
        packed = torch.cat([tokens[n].flatten(2) for n in "qkv"], -1)
        widths = [tokens[n][0, 0].numel() for n in "qkv"]
        for name, part in zip("qkv", packed.split(widths, -1)):
            views[name] = part.view(tokens[name].shape)
        gates = torch.cat([tokens["g"], tokens["beta"]], -1)
        views["g"], views["beta"] = gates.split(4, -1)
        assert torch.equal(x.replay(tokens), y.replay(views))


class TestReference(Either):
    """In plain torch, as it serves wherever no kernel does."""

    pytestmark = compiled

    @staticmethod
    def same(a, b):  # sums of torch may be in another order for other sizes
        return relative_error(a, b) < 1e-12


def many_tokens(T, dtype, H=2, D=32):
    """q, k, v, g, beta [1, T, ..] in bf16's values: keys that share a direction, and gates so slow
    that errors live long."""
    torch.manual_seed(0)
    q, k, v = torch.nn.functional.silu(torch.randn(3, 1, T, H, D)).bfloat16().to(dtype)
    return q, k, v, -torch.empty(1, T, H, dtype=dtype).uniform_(1e-4, 1e-3), torch.rand(1, T, H)


def every_token(tokens, state):
    """o and the final state by a state [1, H, D, D] that is rounded to a dtype at every token."""
    (_, T, H, D), step = tokens[0].shape, submodule("gdn.api").fused_recurrent_gated_delta_rule
    S, outputs = torch.zeros(1, H, D, D, dtype=state), []
    for t in range(T):
        o, _ = step(
            *(x[:, t : t + 1] for x in tokens), initial_state=S, inplace_final_state=True,
            use_qk_l2norm_in_kernel=True, state_v_first=True,
        )  # fmt: skip
        outputs.append(o)
    return torch.cat(outputs, 1), S


def replayed(tokens, state):
    """The same by replay_gated_delta_rule, with a ring of 16 rows."""
    (_, T, H, D), dtype = tokens[0].shape, tokens[0].dtype
    pool, cursor = torch.zeros(1, H, D, D, dtype=state), torch.zeros(1, 2, dtype=torch.int32)
    api, outputs = submodule("gdn.api_replay"), []
    ring = api.make_ring(pool, H, dtype)
    for t in range(T):
        now = [x[:, t : t + 1] for x in tokens]
        o = api.replay_gated_delta_rule(*now, pool, ring, cursor, use_qk_l2norm_in_kernel=True)
        outputs.append(o)
        api.advance_ring(cursor, ring)
    return torch.cat(outputs, 1), api.materialise_ring(pool, ring, cursor)


@compiled
def test_many_tokens():
    """Exact over 25 rings, but for what fp64 rounds."""
    tokens = many_tokens(400, F64)
    for found, want in zip(replayed(tokens, F64), every_token(tokens, F64)):
        assert relative_error(found, want) < 1e-13


@functools.cache
def and_the_truth():
    """Tokens, and what the recurrence gives for them in fp64."""
    tokens = many_tokens(600, F32)
    return tokens, every_token([x.double() for x in tokens], F64)


@compiled
@pytest.mark.parametrize("state, share", [(F32, 1.0), (BF16, 0.35)], ids=["fp32", "bf16"])
def test_no_less_accurate_than_writing_every_token(state, share):
    """Over 600 tokens; a bf16 state's error is that of its writes, the root of 16 times less."""
    tokens, true = and_the_truth()
    for found, theirs, want in zip(replayed(tokens, state), every_token(tokens, state), true):
        assert relative_error(found, want) <= share * relative_error(theirs, want)


def public(max_tokens=1, **changes):
    """Arguments of replay_gated_delta_rule, on a CPU."""
    x = Decoding(False, H=2, HV=4, max_tokens=max_tokens, R=6)
    tokens = {n: y for n, y in x.tokens(max_tokens).items() if y is not None}
    held = {"initial_state": x.pool, "ring": x.ring, "cursor": x.cursor}
    return {**tokens, **held, **changes}


@compiled
def test_bad_rings_and_cursors(kernel):
    state, x = torch.zeros(3, 4, 8, 16), public(max_tokens=2)
    cursor, ring = x["cursor"], x["ring"]
    none = {n: x[n][:, :0] for n in ("q", "k", "v", "g", "beta")}
    step, advance = kernel.replay_gated_delta_rule, kernel.advance_ring
    for error, words, call in (
        (ValueError, "ring must have a capacity of twice max_tokens, 8 tokens, got 7",
         lambda: kernel.make_ring(state, 2, F32, rows=7, max_tokens=4)),
        (ValueError, "heads must divide the 4 heads of state, got 3",
         lambda: kernel.make_ring(state, 3, F32)),
        (ValueError, "num_accepted_tokens must be given", lambda: advance(cursor, ring)),
        (ValueError, "num_accepted_tokens must be 0 to 2",
         lambda: advance(cursor, ring, torch.tensor([0, 1, 3]))),
        (ValueError, "num_accepted_tokens must be None",
         lambda: advance(cursor, public()["ring"], torch.tensor([0, 1, 3]))),
        (ValueError, "q must have a number of tokens T of 1 to 2", lambda: step(**{**x, **none})),
        (ValueError, "state_indices must be below the 3 rows", lambda: kernel.materialise_ring(
            state, ring, cursor, state_indices=torch.tensor([0, 5, 1]))),
        (TypeError, "ring.k must have the dtype of k",
         lambda: step(**{**x, "ring": ring._replace(k=ring.k.half())})),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


@compiled
def test_operators():
    ops, x = submodule("gdn.ops_replay"), Decoding(False, rows=ROWS)
    x.ring = x.ring._replace(k=x.ring.k.zero_(), u=x.ring.u.zero_(), g=x.ring.g.zero_())
    call = x.call(x.tokens())
    checks = ("test_schema", "test_faketensor")
    ring, out = x.ring[:3], torch.empty_like(call.v)
    for operation, args in (
        (ops.REPLAY, (*call.tensors, *call.options)),
        (ops.REPLAY, (*call._replace(out=out).tensors, *call.options)),
        (ops.ADVANCE, (x.cursor, None, None, x.rows, *ring, 1, -1)),
        (ops.MATERIALISE, (x.pool, *ring, x.cursor, x.rows, 1, -1, False)),
        (ops.MATERIALISE_IN_PLACE, (x.pool, *ring, x.cursor, x.rows, 1, -1, True)),
    ):
        torch.library.opcheck(operation.op, args, test_utils=checks)


class Kernel(Either):
    kernels = True
    DTYPES = (F32, F16) if INTERPRETING else (F32, BF16)
    STATES = (F32, F16) if INTERPRETING else (BF16, F16)
    STEPS, ROOM = (7, 5) if INTERPRETING else (100, 16)


@interpreted
class TestInterpreted(Kernel):
    pass


@compiled
@pytest.mark.gpu
class TestCompiled(Kernel):
    device = "cuda"

    @pytest.mark.parametrize("T", [1, 4])
    @pytest.mark.parametrize("state", [F32, BF16], ids=str)
    def test_full_size(self, T, state):
        sizes = {"N": 5, "H": 4, "HV": 16, "K": 128, "V": 128, "R": 16, "rows": [4, -1, 2, 7, 0]}
        x = self.decoding(dtype=BF16, state=state, max_tokens=T, raw=True, **sizes)
        for _ in range(40):
            accepted = torch.randint(1, T + 1, (5,), generator=x.random).to("cuda")
            x.step(T, x.some(0.05), None if T == 1 else accepted)
        assert x.flushes > 8
        x.check()

    @pytest.mark.parametrize("K, V, R", [(100, 40, 12), (64, 72, 16), (256, 128, 16), (16, 32, 16)])
    @pytest.mark.parametrize("state", [F32, BF16], ids=str)
    def test_keys_in_bf16(self, state, K, V, R):
        """Which tensor cores write a state with; forced writes, so of rings of any length."""
        x = self.decoding(
            dtype=BF16, state=state, N=4, H=2, HV=4, K=K, V=V, R=R, raw=True, rows=[3, -1, 0, 5]
        )
        for _ in range(3 * R):
            x.step(1, x.some(0.1))
        assert x.flushes > 8
        x.check()

    def test_long(self):
        x = self.decoding(K=128, V=128, R=16)
        for _ in range(4096):
            x.step()
        x.check()

    @pytest.mark.parametrize("T", [1, 3])
    def test_graph(self, T):
        """A captured step goes through a period and more: cursor, flushes and all."""
        twin, x = (self.decoding(max_tokens=T, R=8, K=64, V=64, rows=ROWS) for _ in "ab")
        fixed = x.tokens(T)
        accepted = None if T == 1 else torch.tensor([1, 2, 3], device="cuda")

        def step(of):
            o = of.replay(fixed)
            of.advance_by(True, accepted, None, of.cursor)
            return o

        for _ in range(20):
            want = step(twin)
        warm = self.decoding(max_tokens=T, R=8, K=64, V=64, rows=ROWS)
        step(warm)  # compiles
        graph, o = captured(step, x)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, want) and torch.equal(x.cursor, twin.cursor)
        assert torch.equal(x.pool, twin.pool) and torch.equal(x.materialise(), twin.materialise())

    def test_large_pool(self):
        """Rows past 2^31 elements."""
        rows = 2**31 // (32 * 128 * 128) + 8
        x = self.decoding(state=BF16, N=1, H=16, HV=32, K=128, V=128, rows=[3], R=4)
        pool = torch.zeros(rows, 32, 128, 128, dtype=BF16, device="cuda")
        pool[-2] = x.pool[3]
        ring = submodule("gdn.api_replay").make_ring(pool, 16, F32, rows=4)
        x.pool, x.ring, x.rows = pool, ring, torch.tensor([rows - 2], device="cuda")
        for _ in range(6):
            x.step()
        assert max(x.errors) < TOLERANCE[BF16]
        assert relative_error(x.materialise(), x.true) < STATE[BF16]
