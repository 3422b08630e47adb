// KvcHybridAttention: append one token, select the pages that matter, attend to their tokens. For a row that fits its
// budget, the code of KvcDenseAttention attends to all entries.
#include <algorithm>
#include <memory>
#include <numeric>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/page_bounds.h"
#include "operators/step.h"

namespace kvc {
namespace {

struct Rule {
    int64_t page_size, top_r, top_k, token_budget, dense_until;
    int64_t recent;  // last entries of a sparse row, which are read in any case

    /// Rows of at most this many entries attend to all of them.
    int64_t dense_limit() const { return std::max({token_budget, dense_until, top_k}); }
};

/// One call: everything that the task for one row and KV head needs.
class HybridStep {
public:
    HybridStep(Call& call, const Rule& rule)
        : rule_(rule),
          step_(call),
          dense_(step_, rule.dense_limit()),
          fp8_bounds_(call.schema().fp8_bounds),
          pages_(call.sizes()[Symbol::kPages]),
          bounds_(call.updated<void>("bounds"), fp8_bounds_, step_.head_size(), pages_) {
        const int64_t expected = PageBounds::pages_of(step_.capacity(), rule.page_size, fp8_bounds_);
        require(pages_ == expected, "bounds: expected ", expected, " pages, found ", pages_);
        require(call.sizes()[Symbol::kTwiceHeadSize] == 2 * step_.head_size(), "bounds: expected ",
                2 * step_.head_size(), " rows, found ", call.sizes()[Symbol::kTwiceHeadSize]);
        require(rule.recent >= 0 && rule.recent <= rule.top_k, "recent: expected 0..", rule.top_k, ", found ",
                rule.recent);
        require(rule.top_r <= step_.head_size(), "top_r: expected at most ", step_.head_size(), ", found ", rule.top_r);
        width_ = rule.dense_limit();
        call.fix(Symbol::kSelectedWidth, width_, "selected");
        selected_ = call.output<int32_t>("selected");
    }

    int64_t rows() const { return step_.rows(); }

    void run(int64_t row) {
        step_.append(row);
        raise_bounds(row);
        const int64_t length = step_.length(row);
        int32_t* const listed = selected_ == nullptr ? nullptr : selected_ + row * width_;
        if (length <= rule_.dense_limit()) {
            for (int64_t part = 0; part < dense_.parts(); ++part) dense_.attend(row, part);
            dense_.merge(row);
            for (int64_t slot = 0; listed != nullptr && slot < length; ++slot)
                listed[slot] = static_cast<int32_t>(slot);
        } else {
            select_and_attend(row, length, listed);
        }
        if (listed != nullptr) std::fill(listed + std::min(length, chosen(length)), listed + width_, -1);
    }

private:
    /// Entries that a row of `length` reads.
    int64_t chosen(int64_t length) const { return length <= rule_.dense_limit() ? length : rule_.top_k; }

    void raise_bounds(int64_t row) const {
        const auto key = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(step_.head_size()));
        step_.read_new_key(row, key.get());
        bounds_.at(row).raise((step_.length(row) - 1) / rule_.page_size, key.get());
    }

    void select_and_attend(int64_t row, int64_t length, int32_t* listed) const {
        const int64_t group = step_.group(), size = step_.head_size(), count = rule_.top_k;
        const int64_t pages = (length + rule_.page_size - 1) / rule_.page_size;
        const int64_t scratch = std::max(page_score_scratch(group, size, pages), attend_scratch(count, group, size));
        const int64_t query = group * size, statistics = 2 * group;
        const auto memory =
            std::make_unique_for_overwrite<float[]>(static_cast<size_t>(scratch + query + statistics + pages + count));
        float* const scaled = memory.get() + scratch;
        float* const maximum = scaled + query;
        int32_t* const ranks = reinterpret_cast<int32_t*>(maximum + statistics);
        int32_t* const tokens = ranks + pages;
        kernels().rank_pages({.query = step_.query(row),
                              .bounds = bounds_.at(row).data(),
                              .fp8_bounds = fp8_bounds_,
                              .group = group,
                              .head_size = size,
                              .pages = pages_,
                              .length = length,
                              .page_size = rule_.page_size,
                              .channels = rule_.top_r,
                              .scratch = memory.get()},
                             ranks);
        // The last `recent` entries do not compete. They come behind all that do, so the list stays ascending.
        const int64_t open = length - rule_.recent, best = count - rule_.recent;
        const int64_t open_pages = (open + rule_.page_size - 1) / rule_.page_size;
        if (best > 0)
            kernels().take_best({.ranks = ranks,
                                 .items = open_pages,
                                 .weight = rule_.page_size,
                                 .last_weight = open - (open_pages - 1) * rule_.page_size},
                                best, tokens);
        std::iota(tokens + best, tokens + count, static_cast<int32_t>(open));
        step_.scale_query(row, scaled);
        kernels().attend({.query = scaled,
                          .keys = step_.keys(row),
                          .values = step_.values(row),
                          .tokens = tokens,
                          .count = count,
                          .group = group,
                          .scratch = memory.get()},
                         {.output = step_.output(row), .maximum = maximum, .total = maximum + group});
        for (int64_t head = 0; head < group; ++head) {
            float* const output = step_.output(row) + head * size;
            for (int64_t channel = 0; channel < size; ++channel) output[channel] /= maximum[group + head];
        }
        if (listed != nullptr) std::copy(tokens, tokens + count, listed);
    }

    Rule rule_;
    Step step_;
    DenseAttention dense_;
    bool fp8_bounds_;
    int64_t pages_, width_;
    PageBounds bounds_;
    int32_t* selected_;
};

class HybridAttentionKernel : public Kernel {
public:
    explicit HybridAttentionKernel(const Attributes& attributes)
        : rule_{.page_size = attributes.integer("page_size", 1),
                .top_r = attributes.integer("top_r", 1),
                .top_k = attributes.integer("top_k", 1),
                .token_budget = attributes.integer("token_budget"),
                .dense_until = attributes.integer("dense_until"),
                .recent = attributes.integer_or("recent", 0)} {}

    void compute(Call& call) const override {
        HybridStep step(call, rule_);
        call.parallel(static_cast<size_t>(step.rows()), [&](size_t row) { step.run(static_cast<int64_t>(row)); });
    }

private:
    Rule rule_;
};

}  // namespace

const Implementation kHybridAttentionImplementation{schemas::kKvcHybridAttention,
                                                    [](const Attributes& attributes) -> std::unique_ptr<Kernel> {
                                                        return std::make_unique<HybridAttentionKernel>(attributes);
                                                    }};

}  // namespace kvc
