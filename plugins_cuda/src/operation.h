// The two functions that the C ABI has for each operation: how much scratch memory a call needs, and the call itself.
//
// An `Operation` is a type with two static functions:
//   Scratch lay_out(const Params&, Workspace&)                       cuts the scratch memory of a call into its parts
//   void run<T>(const Params&, const Scratch&, Stream&)              launches the kernels for caches of element type T
#pragma once

#include "src/launch.h"
#include "src/validate.h"

namespace kvc {

struct NoScratch {};

/// The `lay_out` of an operation that needs no scratch memory.
struct WithoutScratch {
    template <class Params>
    static NoScratch lay_out(const Params&, Workspace&) {
        return {};
    }
};

/// Bytes of scratch memory that a call with validated parameters needs.
template <class Operation, class Params>
uint64_t workspace_bytes(const Params& params) {
    Workspace measured;
    Operation::lay_out(params, measured);
    return measured.used();
}

/// kvc_..._workspace of the C ABI.
template <class Operation, class Params>
KvcStatus query_workspace(const Params* params, uint64_t* bytes, KvcMessage* message) {
    return guard(message, [&] {
        validate_sizes(params);
        validate_result(bytes);
        *bytes = workspace_bytes<Operation>(*params);
    });
}

/// The function of the C ABI that runs the operation.
template <class Operation, class Params>
KvcStatus call(const Params* params, void* workspace, uint64_t bytes, void* stream, KvcMessage* message) {
    return guard(message, [&] {
        validate(params);
        validate_workspace(workspace, bytes, workspace_bytes<Operation>(*params));
        Workspace parts(workspace, bytes);
        const auto scratch = Operation::lay_out(*params, parts);
        Stream launches(static_cast<cudaStream_t>(stream));
        dispatch_dtype(params->dtype, [&](auto tag) {
            using T = typename decltype(tag)::Type;
            Operation::template run<T>(*params, scratch, launches);
        });
    });
}

}  // namespace kvc
