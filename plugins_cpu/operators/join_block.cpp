// KvcJoinBlock: copies stored and new tokens of a turn into one table, and writes zeros after them.
#include <algorithm>
#include <cstring>
#include <memory>

#include "operators/all.h"

namespace kvc {
namespace {

constexpr size_t kStored = 4, kNew = 5, kJoined = 2;

class JoinBlockKernel : public Kernel {
public:
    void compute(Call& call) const override {
        const Sizes& sizes = call.sizes();
        const int64_t batch = sizes[Symbol::kBatch], kv_heads = sizes[Symbol::kKvHeads];
        const int64_t block = sizes[Symbol::kBlock], capacity = sizes[Symbol::kCapacity];
        const int64_t size = sizes[Symbol::kHeadSize], width = capacity + block;
        const int64_t* const stored = call.input<int64_t>(kStored);
        const int64_t* const added = call.input<int64_t>(kNew);
        for (int64_t row = 0; row < batch; ++row) {
            require(stored[row] >= 0 && stored[row] <= capacity, "cache_lengths: expected 0..", capacity, ", found ",
                    stored[row]);
            require(added[row] > 0 && added[row] <= block, "lengths: expected 1..", block, ", found ", added[row]);
        }
        call.fix(Symbol::kCapacityAndBlock, width, "k_cache and k_new");
        int64_t* const joined = call.output<int64_t>(kJoined);
        for (int64_t row = 0; row < batch; ++row) joined[row] = stored[row] + added[row];
        for (size_t table = 0; table < 2; ++table) {
            const float* const fresh = call.input<float>(table);
            const float* const cache = call.input<float>(2 + table);
            float* const target = call.output<float>(table);
            call.parallel(static_cast<size_t>(batch * kv_heads), [&](size_t task) {
                const int64_t part = static_cast<int64_t>(task), row = part / kv_heads;
                float* place = target + part * width * size;
                place = copy(place, cache + part * capacity * size, stored[row] * size);
                place = copy(place, fresh + part * block * size, added[row] * size);
                std::fill(place, target + (part + 1) * width * size, 0.0f);
            });
        }
    }

private:
    static float* copy(float* target, const float* source, int64_t count) {
        std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
        return target + count;
    }
};

}  // namespace

const Implementation kJoinBlockImplementation{
    std::span<const Schema>(schemas::kKvcJoinBlock).first(1),
    [](const Attributes&) -> std::unique_ptr<Kernel> { return std::make_unique<JoinBlockKernel>(); }};

}  // namespace kvc
