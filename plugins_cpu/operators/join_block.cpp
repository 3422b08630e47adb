// KvcJoinBlock: copies stored and new tokens of a turn into one table, and writes zeros after them.
#include <memory>

#include "operators/all.h"
#include "operators/tables.h"

namespace kvc {
namespace {

class JoinBlockKernel : public Kernel {
public:
    void compute(Call& call) const override {
        const Sizes& sizes = call.sizes();
        const int64_t batch = sizes[Symbol::kBatch], kv_heads = sizes[Symbol::kKvHeads];
        const int64_t block = sizes[Symbol::kBlock], capacity = sizes[Symbol::kCapacity];
        const int64_t size = sizes[Symbol::kHeadSize], width = capacity + block;
        const int64_t* const stored = call.input<int64_t>("cache_lengths");
        const int64_t* const added = call.input<int64_t>("lengths");
        for (int64_t row = 0; row < batch; ++row) {
            require(stored[row] >= 0 && stored[row] <= capacity, "cache_lengths: expected 0..", capacity, ", found ",
                    stored[row]);
            require(added[row] > 0 && added[row] <= block, "lengths: expected 1..", block, ", found ", added[row]);
        }
        call.fix(Symbol::kCapacityAndBlock, width, "k_cache and k_new");
        int64_t* const joined = call.output<int64_t>("joined_lengths");
        for (int64_t row = 0; row < batch; ++row) joined[row] = stored[row] + added[row];
        const Tables<const uint8_t> caches = call.input_tables("k_cache");
        const Tables<uint8_t> targets = call.output_tables("k");
        const auto join = [&](const float* fresh, const Vectors& cache, const WritableVectors& target) {
            call.parallel(static_cast<size_t>(batch * kv_heads), [&](size_t task) {
                const int64_t part = static_cast<int64_t>(task), row = part / kv_heads;
                const WritableVectors table = from_token(target, part * width);
                put_vectors(from_token(cache, part * capacity), stored[row], table);
                put_vectors(exact_vectors(fresh + part * block * size, size), added[row],
                            from_token(table, stored[row]));
                clear_vectors(from_token(table, joined[row]), width - joined[row]);
            });
        };
        join(call.input<float>("k_new"), caches.keys, targets.keys);
        join(call.input<float>("v_new"), caches.values, targets.values);
    }
};

}  // namespace

const Implementation kJoinBlockImplementation{schemas::kKvcJoinBlock, [](const Attributes&) -> std::unique_ptr<Kernel> {
                                                  return std::make_unique<JoinBlockKernel>();
                                              }};

}  // namespace kvc
