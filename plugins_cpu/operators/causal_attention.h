// Attention over a prompt and over a turn: tiles of queries and keys, over all rows and KV heads.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "onnxruntime/call.h"

namespace kvc {

/// Causal attention of new tokens to a table of entries that includes them.
struct CausalAttention {
    const PrefillKernels& kernels;
    const float* q;                ///< [batch, kv_heads * group, queries, size]
    Tables<const uint8_t> tables;  ///< keys and values [batch, kv_heads, length]
    float* o;                      ///< like q
    int64_t batch, kv_heads, group, size;
    int64_t length;         ///< entries of the table
    int64_t queries;        ///< query i of row b sees the first before[b] + i + 1 entries
    const int64_t* before;  ///< [batch]

    /// Computes o on the call's threads. Memory is linear in `length`.
    void run(const Call& call) const;

private:
    int64_t tiles() const { return (length + kPrefillTile - 1) / kPrefillTile; }
    int64_t layout_bytes() const { return tiles() * kernels.bytes_of_tile(size); }
    int64_t seen(int64_t part) const;
    void lay_out(const Call& call, int64_t first, int64_t count, uint8_t* layout) const;
    void attend(const Call& call, int64_t first, int64_t count, const uint8_t* layout) const;
};

}  // namespace kvc
