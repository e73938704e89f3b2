import sys,re,itertools,time
sys.path.insert(0,"/work/wt/train/tools"); sys.path.insert(0,"/work/wt/train/tests")
import triton, torch
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
import compile_all as ca
from conftest import submodule
T={"sm_80":GPUTarget("cuda",80,32),"sm_90":GPUTarget("cuda",90,32),"sm_100":GPUTarget("cuda",100,32),"sm_120":GPUTarget("cuda",120,32),"gfx942":GPUTarget("hip","gfx942",64)}
def go(kernel,sig,const,opts,target="sm_90",packed=False,name=""):
    S,C,A={}, {}, {}
    for i,a in enumerate(kernel.arg_names):
        if a in const: S[a]="constexpr"; C[(i,)]=const[a]
        elif a.endswith("_strides"):
            n=sig[a]; S[a]=("i32",)*n
            if a.startswith(("s0","ds")): S[a]=("i32","i32","i32","constexpr"); C[(i,3)]=1
            for j in range(n):
                if S[a][j]!="constexpr" and not a.startswith(("g_","beta_")): A[(i,j)]=[["tt.divisibility",16]]
            if a.startswith(("g_","beta_")): S[a]=("i32","i32","constexpr"); C[(i,2)]=1
        else:
            S[a]=sig[a]
            if S[a].startswith("*"): A[(i,)]=[["tt.divisibility",16]]
    t0=time.time()
    try: c=triton.compile(ASTSource(kernel,S,C,A),target=T[target],options=opts)
    except Exception as e: print(name,target,opts,"ERR",str(e)[-200:]); return
    r=ca.Report(name,target); r.shared=c.metadata.shared
    if "cubin" in c.asm:
        ca._read_cubin(c.asm["cubin"],r); r.serialized=r.hgmma>0 and ca._is_serialized(c.asm["ptx"])
    else: ca._read_amdgcn(c.asm["amdgcn"],r)
    print(f"{name:40s} {target} {opts} regs {r.registers} spill {r.spills} smem {r.shared} hgmma {r.hgmma} waits {r.waits} {'SER' if r.serialized else ''} {time.time()-t0:.0f}s",flush=True)
    return c
st=submodule("portable.gdn_backward_states")._states_bwd_kernel
gr=submodule("portable.gdn_backward_gradients")._gradients_bwd_kernel
be=submodule("portable.gdn_backward_beta")._beta_bwd_kernel
def states(dt="bf16",K=128,V=128,BV=64,ST=2,W=4,target="sm_90",R=2):
    sig={n:"*"+dt for n in "q_ptr k_ptr v_ptr do_ptr tb_ptr p_ptr h_ptr dh_ptr vt_ptr dv_ptr".split()}
    sig.update(f_ptr="*fp32",T="i32",q_strides=3,k_strides=3,v_strides=3,do_strides=3,s0_strides=4,ds1_strides=4,ds0_strides=4)
    sig.update(s0_ptr="*fp32",ds1_ptr="*fp32",ds0_ptr="*fp32")
    const=dict(cu_ptr=None,H=16,R=R,K=K,V=V,BLOCK_K=triton.next_power_of_2(max(K,16)),BLOCK_V=BV,STAGES=ST,PREC="tf32x3" if dt=="fp32" else "tf32")
    return go(st,sig,const,dict(num_warps=W,num_stages=3),target,name=f"states {dt} K{K} BV{BV} ST{ST}")
def grads(dt="bf16",K=128,V=128,BV=64,ST=2,W=8,target="sm_90",R=2,gate=True):
    sig={n:"*"+dt for n in "q_ptr k_ptr g_ptr beta_ptr do_ptr vt_ptr dv_ptr h_ptr dh_ptr dq_ptr dk_ptr dg_ptr dbeta_ptr".split()}
    sig.update(f_ptr="*fp32",gate_ptr="*fp32",A_log_ptr="*fp32",dt_bias_ptr="*fp32",T="i32",N="i32",NT="i32",scale="fp32",q_strides=3,k_strides=3,g_strides=3,beta_strides=3,do_strides=3)
    const=dict(cu_ptr=None,H=16,R=R,HEADS=triton.next_power_of_2(R),K=K,V=V,L2NORM=True,SIGMOID=gate,BETA_MAX=1.0,BLOCK_K=triton.next_power_of_2(max(K,16)),BLOCK_V=BV,STAGES=ST,PREC="tf32x3" if dt=="fp32" else "tf32")
    if not gate: const.update(gate_ptr=None,A_log_ptr=None,dt_bias_ptr=None)
    return go(gr,sig,const,dict(num_warps=W,num_stages=3),target,name=f"grads {dt} K{K} BV{BV} ST{ST}")
def beta(dt="bf16",K=128,V=128,BV=32,W=8,target="sm_90",R=2):
    sig={n:"*"+dt for n in "k_ptr v_ptr g_ptr beta_ptr p_ptr do_ptr vt_ptr dv_ptr h_ptr dh_ptr dbeta_ptr".split()}
    sig.update(f_ptr="*fp32",A_log_ptr="*fp32",dt_bias_ptr="*fp32",T="i32",N="i32",NT="i32",k_strides=3,v_strides=3,g_strides=3,beta_strides=3,do_strides=3)
    const=dict(cu_ptr=None,H=16,R=R,K=K,V=V,L2NORM=True,SIGMOID=True,BETA_MAX=1.0,SMALL=1e-12,BLOCK_K=triton.next_power_of_2(max(K,16)),BLOCK_V=BV,PREC="tf32x3" if dt=="fp32" else "tf32")
    return go(be,sig,const,dict(num_warps=W,num_stages=3),target,name=f"beta {dt} K{K} BV{BV}")
if __name__=="__main__":
    for a in sys.argv[1:]: eval(a)
