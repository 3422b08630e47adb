// KvcCompact and KvcCompactTurn: keep the part of a prompt's cache, or of stored and new tokens, that the last queries
// attend to. A row that fits keeps everything. KvcCompactAverage and KvcCompactAverageTurn pool by sums, not by maxima.
#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/page_bounds.h"
#include "operators/tables.h"

namespace kvc {
namespace {

struct Rule {
    int64_t budget, capacity, pool_kernel, page_size;
    bool averages;
};

/// One call: everything that the task for one row and KV head needs.
class Compaction {
public:
    Compaction(Call& call, const Rule& rule, bool of_turn)
        : rule_(rule),
          batch_(call.sizes()[Symbol::kBatch]),
          kv_heads_(call.sizes()[Symbol::kKvHeads]),
          group_(0),
          window_(call.sizes()[Symbol::kWindow]),
          padded_length_(call.sizes()[Symbol::kPromptLength]),
          size_(call.sizes()[Symbol::kHeadSize]),
          pages_(PageBounds::pages_of(rule.capacity, rule.page_size, call.schema().fp8_bounds)),
          query_(call.input<float>(0)),
          source_(of_turn ? call.input_tables("k")
                          : Tables<const uint8_t>{exact_vectors(call.input<float>("k"), size_),
                                                  exact_vectors(call.input<float>("v"), size_)}),
          lengths_(call.input<int64_t>("prompt_lengths")),
          window_lengths_(of_turn ? call.input<int64_t>("window_lengths") : nullptr),
          budgets_(call.input<int64_t>("prompt_budgets")),
          pool_kernels_(call.input<int64_t>("pool_kernels")),
          bounds_(nullptr, false, size_, pages_) {
        const int64_t heads = call.sizes()[Symbol::kHeads];
        require(kv_heads_ > 0 && heads % kv_heads_ == 0, "q_window: expected a multiple of ", kv_heads_,
                " heads, found ", heads);
        require(size_ > 0, "k: expected a head size above 0");
        group_ = heads / kv_heads_;
        for (int64_t row = 0; row < batch_; ++row) {
            const int64_t window = this->window(row);
            require(window > 0 && window <= window_, "window_lengths: expected 1..", window_, ", found ", window);
            require(length(row) <= budget(row) || window <= rule.budget,
                    "prompt_budget: expected at least the window's ", window, ", found ", rule.budget);
        }
        call.fix(Symbol::kCapacity, rule.capacity, "capacity");
        call.fix(Symbol::kTwiceHeadSize, 2 * size_, "k");
        call.fix(Symbol::kPages, pages_, "capacity");
        kept_ = call.output_tables("k_cache");
        bounds_ = PageBounds(call.output<void>("bounds"), call.schema().fp8_bounds, size_, pages_);
        int64_t* const stored = call.output<int64_t>("cache_lengths");
        for (int64_t row = 0; row < batch_; ++row) stored[row] = std::min(length(row), budget(row));
        indices_ = call.output<int32_t>("indices");
    }

    int64_t parts() const { return batch_ * kv_heads_; }

    void run(int64_t part) const {
        const int64_t length = this->length(part / kv_heads_), budget = this->budget(part / kv_heads_);
        const int64_t stored = std::min(length, budget);
        int32_t* const kept = indices_ + part * rule_.capacity;
        if (length > budget) {
            choose(part, length, kept);
        } else {
            for (int64_t slot = 0; slot < length; ++slot) kept[slot] = static_cast<int32_t>(slot);
        }
        std::fill(kept + stored, kept + rule_.capacity, -1);
        gather(source_.keys, kept_.keys, part, stored);
        gather(source_.values, kept_.values, part, stored);
        if (bounds_.data() != nullptr) write_bounds(part, stored);
    }

private:
    int64_t length(int64_t row) const { return std::clamp<int64_t>(lengths_[row], 0, padded_length_); }

    /// The queries of a row that vote: the last `window` ones.
    int64_t window(int64_t row) const { return window_lengths_ == nullptr ? window_ : window_lengths_[row]; }

    /// The tokens that a row keeps: its own number, where rows have them, but no less than its window.
    int64_t budget(int64_t row) const {
        if (budgets_ == nullptr) return rule_.budget;
        return std::min(std::max(budgets_[row], window(row)), rule_.budget);
    }

    /// How far pooling reaches to either side of a position of a row.
    int64_t reach(int64_t row) const {
        if (pool_kernels_ == nullptr) return (rule_.pool_kernel - 1) / 2;
        return (std::clamp<int64_t>(pool_kernels_[row], 1, rule_.pool_kernel) - 1) / 2;
    }

    /// Chooses the best tokens before the window, ascending, then the window.
    void choose(int64_t part, int64_t length, int32_t* kept) const {
        const int64_t row = part / kv_heads_, window = this->window(row);
        const int64_t prefix = length - window, wanted = budget(row) - window;
        for (int64_t index = 0; index < window; ++index) kept[wanted + index] = static_cast<int32_t>(prefix + index);
        if (wanted == 0) return;
        const int64_t reach = this->reach(row), queries = group_ * window * size_;
        const int64_t scratch = observe_scratch(length, group_ * window, size_);
        const auto memory =
            std::make_unique_for_overwrite<float[]>(static_cast<size_t>(scratch + queries + prefix + 2 * reach));
        float* const scaled = memory.get() + scratch;
        int32_t* const ranks = reinterpret_cast<int32_t*>(scaled + queries);
        scale_queries(part, window, scaled);
        kernels().observe({.query = scaled,
                           .keys = from_token(source_.keys, part * padded_length_),
                           .length = length,
                           .group = group_,
                           .window = window,
                           .head_size = size_,
                           .reach = reach,
                           .adds = rule_.averages,
                           .scratch = memory.get()},
                          ranks);
        kernels().take_best({.ranks = ranks, .items = prefix, .weight = 1, .last_weight = 1}, wanted, kept);
    }

    /// The last `window` queries of every head of the group, divided by sqrt(head size).
    void scale_queries(int64_t part, int64_t window, float* scaled) const {
        const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size_)));
        for (int64_t head = 0; head < group_; ++head) {
            const float* const last = query_ + ((part * group_ + head + 1) * window_ - window) * size_;
            float* const target = scaled + head * window * size_;
            for (int64_t index = 0; index < window * size_; ++index) target[index] = last[index] * factor;
        }
    }

    /// Moves the kept tokens to their slots, as the cache stores them, and writes zeros after them.
    void gather(const Vectors& source, const WritableVectors& target, int64_t part, int64_t stored) const {
        const Vectors from = from_token(source, part * padded_length_);
        const WritableVectors to = from_token(target, part * rule_.capacity);
        const int32_t* const kept = indices_ + part * rule_.capacity;
        for (int64_t slot = 0; slot < stored; ++slot) {
            put_vectors(from_token(from, kept[slot]), 1, from_token(to, slot));
        }
        clear_vectors(from_token(to, stored), rule_.capacity - stored);
    }

    /// Computes the bounds of the keys as the cache gives them back.
    void write_bounds(int64_t part, int64_t stored) const {
        const PageBounds bounds = bounds_.at(part);
        const Vectors keys = from_token(readable(kept_.keys), part * rule_.capacity);
        const int64_t most = std::min(rule_.page_size, rule_.capacity);
        const auto memory = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(most * size_));
        for (int64_t page = 0; page < pages_; ++page) {
            const int64_t first = page * rule_.page_size;
            const int64_t count = std::clamp<int64_t>(stored - first, 0, rule_.page_size);
            if (count > 0) kernels().widen_vectors(from_token(keys, first), count, memory.get());
            bounds.set(page, memory.get(), count);
        }
    }

    Rule rule_;
    int64_t batch_, kv_heads_, group_, window_, padded_length_, size_, pages_;
    const float* query_;
    Tables<const uint8_t> source_;
    const int64_t *lengths_, *window_lengths_, *budgets_, *pool_kernels_;
    Tables<uint8_t> kept_;
    PageBounds bounds_;
    int32_t* indices_;
};

class CompactKernel : public Kernel {
public:
    CompactKernel(const Attributes& attributes, bool of_turn, bool averages)
        : of_turn_(of_turn),
          rule_{.budget = attributes.integer("prompt_budget", 1),
                .capacity = attributes.integer("capacity", 1),
                .pool_kernel = attributes.integer("pool_kernel", 1),
                .page_size = attributes.integer("page_size", 1),
                .averages = averages} {}

    void compute(Call& call) const override {
        const Compaction compaction(call, rule_, of_turn_);
        call.parallel(static_cast<size_t>(compaction.parts()),
                      [&](size_t part) { compaction.run(static_cast<int64_t>(part)); });
    }

private:
    bool of_turn_;
    Rule rule_;
};

template <bool kOfTurn, bool kAverages>
std::unique_ptr<Kernel> make(const Attributes& attributes) {
    return std::make_unique<CompactKernel>(attributes, kOfTurn, kAverages);
}

}  // namespace

const Implementation kCompactImplementation{schemas::kKvcCompact, make<false, false>};
const Implementation kCompactTurnImplementation{schemas::kKvcCompactTurn, make<true, false>};
const Implementation kCompactAverageImplementation{schemas::kKvcCompactAverage, make<false, true>};
const Implementation kCompactAverageTurnImplementation{schemas::kKvcCompactAverageTurn, make<true, true>};

}  // namespace kvc
