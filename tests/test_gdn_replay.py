"""Decoding with a ring: the reference and the kernels against the token recurrence in fp64, over
many flushes, and what is promised of rings, cursors and rows."""

import pytest
import torch
from conftest import TOLERANCE, relative_error, submodule
from interpreter import INTERPRETING, compiled, interpreted, rerun

calls, reference = submodule("gdn.call"), submodule("gdn.reference.replay")
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


def functions(kernels: bool):
    return submodule("gdn.portable.replay") if kernels else reference


class Decoding:
    """Sequences that are decoded with a ring, and the token recurrence in fp64 beside it."""

    def __init__(
        self, kernels, dtype=F32, state=None, N=3, H=1, HV=2, K=16, V=8, R=8, max_tokens=1,
        rows=None, raw=False, l2norm=True, gates="slow", device="cpu", seed=0, u=None, apart=False,
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
        self.live = [n for n in range(N) if rows is None or rows[n] >= 0]
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

    def call(self, x, force=None):
        options = calls.ReplayOptions(
            x["k"].shape[-1] ** -0.5, self.l2norm, self.raw, self.raw, self.ring.max_tokens
        )
        ring = self.ring[:3]
        return calls.ReplayCall(*x.values(), self.pool, *ring, self.cursor, force, self.rows, options)

    def replay(self, x, force=None):
        call = self.call(x, force)
        if self.kernels:
            assert functions(True).supports_gdn_replay_fwd(call)
        return functions(self.kernels).gdn_replay_fwd(call)

    def advance(self, accepted=None, force=None):
        rest = (accepted, force, self.rows, self.ring.k.shape[2], self.ring.max_tokens)
        want = reference.gdn_ring_advance(self.cursor.clone(), *rest)
        functions(self.kernels).gdn_ring_advance(self.cursor, *rest)
        assert torch.equal(self.cursor, want)

    def materialise(self, inplace=False):
        tensors = (self.pool, *self.ring[:3], self.cursor, self.rows)
        return functions(self.kernels).gdn_ring_materialise(*tensors, inplace)

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
        """Outputs so far, and the states now, rows of nobody too."""
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
    """What reference and kernels do."""

    kernels, device = False, "cpu"
    DTYPES = (F64, F32)
    STATES = (BF16, F16)
    STEPS, ROOM = 40, 16

    def decoding(self, **options):
        return Decoding(self.kernels, **{"device": self.device, "dtype": self.DTYPES[0], **options})

    @pytest.mark.parametrize("dtype", [0, 1], ids=["first", "second"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    @pytest.mark.parametrize("rows", [None, ROWS], ids=["alone", "pool"])
    def test_one_token(self, dtype, sizes, rows):
        """Staggered: a forced flush of one sequence, and each goes on at its own place."""
        names = dict(zip(("H", "HV", "K", "V"), sizes))
        x = self.decoding(dtype=self.DTYPES[dtype], rows=rows, R=5, raw=rows is None, **names)
        for t in range(13):
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
        """In place, for whoever reads states; then decoding goes on with empty rings."""
        x = self.decoding(rows=ROWS)
        for _ in range(3):
            x.step()
        now = x.materialise()
        assert x.materialise(inplace=True) is x.pool
        assert torch.equal(x.pool[x.at], now[x.live].to(x.pool.dtype))
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
            assert torch.equal(one.replay(mine, force[keep]), o[keep])
            many.advance(kept, force)
            one.advance(None if kept is None else kept[keep], force[keep])
        assert torch.equal(one.pool, many.pool[keep]) and torch.equal(one.cursor, many.cursor[keep])
        assert torch.equal(one.materialise(), many.materialise()[keep])

    def test_poisoned_rows_of_nobody(self):
        """What a padding row of the batch holds may be anything."""
        x = self.decoding(rows=ROWS)
        tokens = x.tokens()
        for name in "qkv":
            tokens[name][1] = NAN
        x.pool[[0, 1, 3, 5]] = NAN
        o = x.replay(tokens)
        assert not o[1].any() and o.isfinite().all()

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

    STEPS = 2000

    pytestmark = compiled

    @pytest.mark.parametrize("state", [F32, BF16], ids=str)
    def test_no_less_accurate_than_writing_every_token(self, state):
        """Over 4,096 tokens, keys sharing a direction and gates so slow that errors live long."""
        torch.manual_seed(0)
        T, H, D = 4096, 2, 32
        q, k, v = torch.nn.functional.silu(torch.randn(3, 1, T, H, D)).bfloat16()
        g, beta = -torch.empty(1, T, H).uniform_(1e-4, 1e-3), torch.rand(1, T, H)
        rule = submodule("gdn.api").fused_recurrent_gated_delta_rule
        options = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
        tokens = (q, k, v, g, beta)
        start = torch.zeros(1, H, D, D)
        wide = [x.double() for x in tokens]
        want, last = rule(*wide, initial_state=start.double(), output_final_state=True, **options)
        # fp32 inputs with bf16's values: what is compared is the state's rounding, not the output's
        tokens = [x.float() for x in tokens]
        every, replayed = start.to(state), start.to(state)
        api = submodule("gdn.api_replay")
        ring, cursor = api.make_ring(start.to(state), H, F32), torch.zeros(1, 2, dtype=torch.int32)
        found = []
        for t in range(T):
            x = [y[:, t : t + 1] for y in tokens]
            a, _ = rule(*x, initial_state=every, inplace_final_state=True, **options)
            b = api.replay_gated_delta_rule(
                *x, replayed, ring, cursor, use_qk_l2norm_in_kernel=True
            )
            api.advance_ring(cursor, ring)
            found.append((a, b))
        theirs, ours = (torch.cat(o, 1)[:, T // 2 :] for o in zip(*found))
        bound = 0.5 if state == BF16 else 1.0  # four times less is expected of 16 rows
        assert relative_error(ours, want[:, T // 2 :]) <= bound * relative_error(
            theirs, want[:, T // 2 :]
        )
        now = api.materialise_ring(replayed, ring, cursor)
        assert relative_error(now, last) <= bound * relative_error(every, last)


class Kernel(Either):
    kernels = True
    DTYPES = (F32, F16) if INTERPRETING else (F32, BF16)
    STATES = (F32, F16) if INTERPRETING else (BF16, F16)
    STEPS, ROOM = (13, 10) if INTERPRETING else (100, 16)


@interpreted
class TestInterpreted(Kernel):
    pass


@compiled
def test_in_the_interpreter():
    rerun(__file__)


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
            rest = (accepted, None, of.rows, 8, T)
            functions(True).gdn_ring_advance(of.cursor, *rest)
            return o

        for _ in range(20):
            want = step(twin)
        warm = self.decoding(max_tokens=T, R=8, K=64, V=64, rows=ROWS)
        step(warm)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = step(x)
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
