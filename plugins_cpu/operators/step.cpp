#include "operators/step.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/choice.h"

namespace kvc {

Step::Step(Call& call)
    : batch_(call.sizes()[Symbol::kBatch]),
      kv_heads_(call.sizes()[Symbol::kKvHeads]),
      group_(0),
      head_size_(call.sizes()[Symbol::kHeadSize]),
      capacity_(call.sizes()[Symbol::kCapacity]),
      query_(call.input<float>(0)),
      k_new_(call.input<float>(1)),
      v_new_(call.input<float>(2)),
      lengths_(call.input<int64_t>("cache_lengths")) {
    const int64_t heads = call.sizes()[Symbol::kHeads];
    require(kv_heads_ > 0 && heads % kv_heads_ == 0, "query: expected a multiple of ", kv_heads_, " heads, found ",
            heads);
    require(head_size_ > 0, "query: expected a head size above 0");
    group_ = heads / kv_heads_;
    for (int64_t row = 0; row < batch_; ++row) {
        require(lengths_[row] >= 0 && lengths_[row] < capacity_, "cache_lengths: expected 0..", capacity_ - 1,
                ", found ", lengths_[row]);
    }
    output_ = call.output<float>(0);
    tables_ = call.updated_tables("k_cache");
}

void Step::append(int64_t row) const {
    const int64_t slot = row * capacity_ + lengths_[row / kv_heads_];
    kernels().store_vectors(k_new_ + row * head_size_, 1, from_token(tables_.keys, slot));
    kernels().store_vectors(v_new_ + row * head_size_, 1, from_token(tables_.values, slot));
}

void Step::read_new_key(int64_t row, float* key) const {
    kernels().widen_vectors(from_token(keys(row), lengths_[row / kv_heads_]), 1, key);
}

void Step::scale_query(int64_t row, float* scaled) const {
    const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_size_)));
    const float* plain = query(row);
    for (int64_t index = 0; index < group_ * head_size_; ++index) scaled[index] = plain[index] * factor;
}

DenseAttention::DenseAttention(const Step& step, int64_t longest) : step_(step), parts_(0) {
    for (int64_t row = 0; row < step.rows(); ++row) {
        if (step.length(row) > longest) continue;
        parts_ = std::max(parts_, (step.length(row) + kPart - 1) / kPart);
    }
    record_ = step.group() * (step.head_size() + 2);
    records_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(step.rows() * parts_ * record_));
}

void DenseAttention::attend(int64_t row, int64_t part) {
    const int64_t start = part * kPart, count = std::min(step_.length(row) - start, kPart);
    if (count <= 0) return;
    const int64_t group = step_.group(), size = step_.head_size();
    const auto scratch =
        std::make_unique_for_overwrite<float[]>(static_cast<size_t>(group * size + attend_scratch(count, group, size)));
    step_.scale_query(row, scratch.get());
    float* const record = records_.get() + (row * parts_ + part) * record_;
    kernels().attend({.query = scratch.get(),
                      .keys = from_token(step_.keys(row), start),
                      .values = from_token(step_.values(row), start),
                      .tokens = nullptr,
                      .count = count,
                      .group = group,
                      .scratch = scratch.get() + group * size},
                     {.output = record, .maximum = record + group * size, .total = record + group * (size + 1)});
}

void DenseAttention::merge(int64_t row) {
    const int64_t group = step_.group(), size = step_.head_size();
    const int64_t parts = (step_.length(row) + kPart - 1) / kPart;
    const float* const first = records_.get() + row * parts_ * record_;
    for (int64_t head = 0; head < group; ++head) {
        float* const output = step_.output(row) + head * size;
        const auto maximum_of = [&](int64_t part) { return first[part * record_ + group * size + head]; };
        float maximum = maximum_of(0);
        for (int64_t part = 1; part < parts; ++part) maximum = std::max(maximum, maximum_of(part));
        std::fill(output, output + size, 0.0f);
        float total = 0.0f;
        for (int64_t part = 0; part < parts; ++part) {
            const float* const record = first + part * record_;
            const float weight = std::exp(maximum_of(part) - maximum);
            total += weight * record[group * (size + 1) + head];
            for (int64_t channel = 0; channel < size; ++channel)
                output[channel] += weight * record[head * size + channel];
        }
        for (int64_t channel = 0; channel < size; ++channel) output[channel] /= total;
    }
}

}  // namespace kvc
