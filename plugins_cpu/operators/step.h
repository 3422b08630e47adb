// The append of a decode step, in place, and attention to all entries of a row.
#pragma once

#include <cstdint>
#include <memory>

#include "onnxruntime/call.h"

namespace kvc {

/// The tensors of one step after the append. All of a row's heads have the same number of entries.
class Step {
public:
    /// Inputs 0..2 are query, k_new, v_new; output 0 is the attention.
    explicit Step(Call& call);

    int64_t rows() const { return batch_ * kv_heads_; }
    int64_t kv_heads() const { return kv_heads_; }
    int64_t group() const { return group_; }
    int64_t head_size() const { return head_size_; }
    int64_t capacity() const { return capacity_; }

    /// Entries of batch row `row / kv_heads`, the new one included.
    int64_t length(int64_t row) const { return lengths_[row / kv_heads_] + 1; }
    const float* query(int64_t row) const { return query_ + row * group_ * head_size_; }
    Vectors keys(int64_t row) const { return readable(from_token(tables_.keys, row * capacity_)); }
    Vectors values(int64_t row) const { return readable(from_token(tables_.values, row * capacity_)); }
    float* output(int64_t row) const { return output_ + row * group_ * head_size_; }

    /// Stores the new key and value of one row and KV head.
    void append(int64_t row) const;

    /// Writes the new key as the cache gives it back, [head_size].
    void read_new_key(int64_t row, float* key) const;

    /// The row's queries divided by sqrt(head size), [group, head_size].
    void scale_query(int64_t row, float* scaled) const;

private:
    int64_t batch_, kv_heads_, group_, head_size_, capacity_;
    const float *query_, *k_new_, *v_new_;
    const int64_t* lengths_;
    float* output_;
    Tables<uint8_t> tables_;
};

/// Attention of one row and KV head to all its entries, in parts of a fixed number of tokens: the result depends
/// neither on the threads nor on the caller, and sparse operators call the same code for rows that fit their budget.
class DenseAttention {
public:
    static constexpr int64_t kPart = 1024;

    /// `longest` is the most entries of any row that will be asked for.
    explicit DenseAttention(const Step& step, int64_t longest = INT64_MAX);

    /// The most parts of a row.
    int64_t parts() const { return parts_; }

    /// Attends to one part; does nothing if the row has no such part.
    void attend(int64_t row, int64_t part);

    /// Merges the parts of a row into its output.
    void merge(int64_t row);

private:
    const Step& step_;
    int64_t parts_, record_;
    std::unique_ptr<float[]> records_;
};

}  // namespace kvc
