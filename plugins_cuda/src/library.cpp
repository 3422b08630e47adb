// Identity of the library: its ABI version, and the executor of its kernels (a GPU or the emulation).
#include "kvc/kvc.h"

extern "C" int32_t kvc_abi_version(void) { return KVC_ABI_VERSION; }

extern "C" const char* kvc_executor(void) {
#ifdef KVC_EMULATION
    return "emulation";
#else
    return "cuda";
#endif
}
