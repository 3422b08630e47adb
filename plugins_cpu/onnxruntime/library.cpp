// The entries of the library: ONNX Runtime calls one to register the operators, Python calls the others to list them.
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "kernels/choice.h"
#include "onnxruntime/abi.h"
#include "onnxruntime/call.h"
#include "operators/all.h"

namespace kvc {
namespace {

// ONNX Runtime keeps pointers to domains and operators, which must outlive every session: they live with the library.
struct Registered : ort::CustomOperator {
    const Implementation* implementation = nullptr;
    const Schema* schema = nullptr;
};

/// ONNX Runtime's functions. Only the first registration writes them: kernels of other sessions may be running.
const ort::Api* api = nullptr;

/// The wording of ONNX Runtime's own allocator, by which Python recognises the case.
constexpr const char* kOutOfMemory = "kvc: Failed to allocate memory";

const Registered& of(const ort::CustomOperator* one) { return *static_cast<const Registered*>(one); }

struct Node {
    const Schema& schema;
    std::unique_ptr<Kernel> kernel;
};

/// Runs `work` and turns an exception into a status whose text begins with the name of the operator.
template <typename Work>
ort::Status* guarded(const Schema& schema, const Work& work) noexcept {
    try {
        work();
        return nullptr;
    } catch (const std::bad_alloc&) {
        return api->create_status(ort::ErrorCode::kFail, kOutOfMemory);
    } catch (const std::exception& error) {
        std::string text(schema.name);
        text.append(": ").append(error.what());
        return api->create_status(ort::ErrorCode::kInvalidArgument, text.c_str());
    }
}

ort::Status* create(const ort::CustomOperator* one, ort::Api::Table, const ort::Info* info, void** made) {
    const Registered& found = of(one);
    return guarded(*found.schema, [&] {
        auto kernel = found.implementation->make(Attributes(*api, info));
        *made = new Node{*found.schema, std::move(kernel)};
    });
}

ort::Status* compute(void* node, ort::Context* context) {
    const Node& found = *static_cast<const Node*>(node);
    return guarded(found.schema, [&] {
        Call call(*api, context, found.schema);
        found.kernel->compute(call);
    });
}

Registered registered(const Implementation& implementation, const Schema& schema) {
    Registered one;
    one.implementation = &implementation;
    one.schema = &schema;
    one.name = [](const ort::CustomOperator* self) { return of(self).schema->name; };
    one.provider = [](const ort::CustomOperator*) { return "CPUExecutionProvider"; };
    one.input_count = [](const ort::CustomOperator* self) { return of(self).schema->inputs.size(); };
    one.input_type = [](const ort::CustomOperator* self, size_t index) { return of(self).schema->inputs[index].type; };
    one.input_presence = [](const ort::CustomOperator* self, size_t index) {
        return of(self).schema->inputs[index].optional ? ort::Presence::kOptional : ort::Presence::kRequired;
    };
    one.input_memory = [](const ort::CustomOperator*, size_t) -> int32_t { return 0; };
    one.output_count = [](const ort::CustomOperator* self) { return of(self).schema->outputs.size(); };
    one.output_type = [](const ort::CustomOperator* self, size_t index) {
        return of(self).schema->outputs[index].type;
    };
    one.output_presence = [](const ort::CustomOperator* self, size_t index) {
        return of(self).schema->outputs[index].optional ? ort::Presence::kOptional : ort::Presence::kRequired;
    };
    one.first_version = [](const ort::CustomOperator*) { return 1; };
    one.last_version = [](const ort::CustomOperator*) { return 1; };
    one.create_kernel = create;
    one.compute = compute;
    one.destroy = [](void* node) { delete static_cast<Node*>(node); };
    return one;
}

/// The domain with all operators, made once. Throws Error with ONNX Runtime's reason.
ort::Domain* domain() {
    static ort::Domain* const made = [] {
        const auto check = [](ort::Status* status) {
            if (status == nullptr) return;
            const std::string reason = api->message(status);
            api->release(status);
            throw Error(reason);
        };
        static const std::vector<Registered> all = [] {
            std::vector<Registered> filled;
            for (const Implementation& one : implementations()) {
                for (const Schema& schema : one.schemas) filled.push_back(registered(one, schema));
            }
            return filled;
        }();
        ort::Domain* created = nullptr;
        check(api->create_domain(kDomain, &created));
        for (const Registered& one : all) check(api->add_to_domain(created, &one));
        return created;
    }();
    return made;
}

}  // namespace
}  // namespace kvc

#define KVC_EXPORT __attribute__((visibility("default")))

extern "C" {

/// Called by ONNX Runtime's register_custom_ops_library.
KVC_EXPORT kvc::ort::Status* RegisterCustomOps(kvc::ort::Options* options, const kvc::ort::ApiBase* base) {
    using namespace kvc;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const ort::Api::Table table = base->get_api(ort::kVersion);
    if (table == nullptr) {
        // Every version of the table has create_status in the same place.
        return ort::Api(base->get_api(1)).create_status(ort::ErrorCode::kFail, "kvc: needs ONNX Runtime 1.17 or newer");
    }
    static const ort::Api found(table);
    if (api == nullptr) api = &found;
    try {
        return api->add_domain(options, domain());
    } catch (const std::exception& error) {
        return api->create_status(ort::ErrorCode::kFail, error.what());
    }
}

/// Names of the operators, separated by spaces. Their activations are float32, and so are caches without a format.
KVC_EXPORT const char* kvc_cpu_operators() {
    static const std::string names = [] {
        std::string text;
        for (const kvc::Implementation& one : kvc::implementations()) {
            for (const kvc::Schema& schema : one.schemas) text.append(schema.name).append(" ");
        }
        return text;
    }();
    return names.c_str();
}

/// Version of the interface that Python expects; it covers the operators' schemas.
KVC_EXPORT int32_t kvc_cpu_interface() { return kvc::kInterface; }

/// The name of the instruction set in use, as in kernels/choice.cpp.
KVC_EXPORT const char* kvc_cpu_instructions() { return kvc::kernels().name; }

/// Switches all sessions of the process to another instruction set; returns 0 if the processor or the library lacks it.
KVC_EXPORT int32_t kvc_cpu_use_instructions(const char* name) { return kvc::use_kernels(name) ? 1 : 0; }

}  // extern "C"
