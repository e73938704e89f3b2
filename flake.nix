{
  description = "fused-swiglu-gdn: SwiGLU and Gated DeltaNet kernels for the Hugging Face Hub";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
