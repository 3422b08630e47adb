"""Call the CUDA kernels from Python: `KernelLibrary` over the C ABI, and `torch.ops.kvc` on top of it.

    from kvc_trt.kernels.ops import kvc            # torch.ops.kvc, registered
    with kvc_trt.kernels.use_library(path): ...    # the library that it calls

PyTorch is imported by `library` and `ops`, not here.
"""

from kvc_trt.kernels.c_library import KernelError, KernelLibraryError
from kvc_trt.kernels.loading import use_library

__all__ = ["KernelError", "KernelLibraryError", "use_library"]
