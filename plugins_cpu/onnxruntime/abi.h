// The part of ONNX Runtime's C interface that a library of custom operators needs, written by hand: the wheels ship no
// headers. The interface is a table of functions that only grows, so a function keeps its place from the version that
// added it. `Api` names the places. Facts: ONNX Runtime 1.17 to 1.31, `OrtApi` and `OrtCustomOp`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvc::ort {

/// The version of the interface that the library asks for: ONNX Runtime 1.17, the first with `parallel_for`.
inline constexpr uint32_t kVersion = 17;

// Objects of ONNX Runtime; the library never looks inside.
struct Status;
struct Options;
struct Domain;
struct Info;
struct Context;
struct Value;
struct Shape;

enum class ErrorCode : int32_t { kFail = 1, kInvalidArgument = 2 };

/// Numbers of ONNX's element types.
enum class ElementType : int32_t { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10 };

enum class Presence : int32_t { kRequired = 0, kOptional = 1 };

/// The functions, each at its place in the table. A null `Status*` means success.
class Api {
public:
    using Table = const void* const*;

private:
    Table table_;

    template <typename Signature, typename... Arguments>
    auto call(size_t place, Arguments... arguments) const {
        return reinterpret_cast<Signature*>(const_cast<void*>(table_[place]))(arguments...);
    }

public:
    explicit Api(Table table) : table_(table) {}

    Status* create_status(ErrorCode code, const char* text) const {
        return call<Status*(ErrorCode, const char*)>(0, code, text);
    }
    const char* message(const Status* status) const { return call<const char*(const Status*)>(2, status); }
    void release(Status* status) const { call<void(Status*)>(93, status); }

    Status* create_domain(const char* name, Domain** made) const {
        return call<Status*(const char*, Domain**)>(26, name, made);
    }
    Status* add_to_domain(Domain* domain, const struct CustomOperator* one) const {
        return call<Status*(Domain*, const CustomOperator*)>(27, domain, one);
    }
    Status* add_domain(Options* options, Domain* domain) const {
        return call<Status*(Options*, Domain*)>(28, options, domain);
    }

    Status* float_attribute(const Info* info, const char* name, float* value) const {
        return call<Status*(const Info*, const char*, float*)>(85, info, name, value);
    }
    Status* integer_attribute(const Info* info, const char* name, int64_t* value) const {
        return call<Status*(const Info*, const char*, int64_t*)>(86, info, name, value);
    }

    Status* input_count(const Context* context, size_t* count) const {
        return call<Status*(const Context*, size_t*)>(88, context, count);
    }
    Status* output_count(const Context* context, size_t* count) const {
        return call<Status*(const Context*, size_t*)>(89, context, count);
    }
    Status* input(const Context* context, size_t index, const Value** value) const {
        return call<Status*(const Context*, size_t, const Value**)>(90, context, index, value);
    }
    /// Allocates an output, or finds the memory that the caller bound; null for an optional output that nobody reads.
    Status* output(Context* context, size_t index, const int64_t* shape, size_t rank, Value** value) const {
        return call<Status*(Context*, size_t, const int64_t*, size_t, Value**)>(91, context, index, shape, rank, value);
    }
    Status* data(const Value* value, void** address) const {
        return call<Status*(const Value*, void**)>(51, value, address);
    }
    Status* shape_of(const Value* value, Shape** shape) const {
        return call<Status*(const Value*, Shape**)>(65, value, shape);
    }
    void release(Shape* shape) const { call<void(Shape*)>(99, shape); }
    Status* rank(const Shape* shape, size_t* rank) const {
        return call<Status*(const Shape*, size_t*)>(61, shape, rank);
    }
    Status* dimensions(const Shape* shape, int64_t* sizes, size_t rank) const {
        return call<Status*(const Shape*, int64_t*, size_t)>(62, shape, sizes, rank);
    }

    /// Calls function(data, 0..count-1) on the session's threads; ONNX Runtime chooses how many batches where it is 0.
    Status* parallel_for(const Context* context, void (*function)(void*, size_t), size_t count, size_t batches,
                         void* data) const {
        return call<Status*(const Context*, void (*)(void*, size_t), size_t, size_t, void*)>(274, context, function,
                                                                                             count, batches, data);
    }
};

/// The argument of the library's entry, given by ONNX Runtime.
struct ApiBase {
    Api::Table (*get_api)(uint32_t version);
    const char* (*version)();
};

/// A custom operator in the form that ONNX Runtime calls. The order of the members is the interface.
struct CustomOperator {
    uint32_t version = kVersion;
    void* (*create_kernel_without_status)(const CustomOperator*, Api::Table, const Info*) = nullptr;
    const char* (*name)(const CustomOperator*) = nullptr;
    const char* (*provider)(const CustomOperator*) = nullptr;
    ElementType (*input_type)(const CustomOperator*, size_t) = nullptr;
    size_t (*input_count)(const CustomOperator*) = nullptr;
    ElementType (*output_type)(const CustomOperator*, size_t) = nullptr;
    size_t (*output_count)(const CustomOperator*) = nullptr;
    void (*compute_without_status)(void*, Context*) = nullptr;
    void (*destroy)(void*) = nullptr;
    Presence (*input_presence)(const CustomOperator*, size_t) = nullptr;
    Presence (*output_presence)(const CustomOperator*, size_t) = nullptr;
    int32_t (*input_memory)(const CustomOperator*, size_t) = nullptr;
    int (*variadic_input_least)(const CustomOperator*) = nullptr;
    int (*variadic_input_alike)(const CustomOperator*) = nullptr;
    int (*variadic_output_least)(const CustomOperator*) = nullptr;
    int (*variadic_output_alike)(const CustomOperator*) = nullptr;
    Status* (*create_kernel)(const CustomOperator*, Api::Table, const Info*, void**) = nullptr;
    Status* (*compute)(void*, Context*) = nullptr;
    Status* (*infer_shapes)(const CustomOperator*, void*) = nullptr;
    int (*first_version)(const CustomOperator*) = nullptr;
    int (*last_version)(const CustomOperator*) = nullptr;
};

}  // namespace kvc::ort
