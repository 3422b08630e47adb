#include "operators/causal_attention.h"

#include <algorithm>

#include "kernels/choice.h"
#include "operators/scratch.h"

namespace kvc {
namespace {

/// Keys that are laid out and attended to at once, over one or several KV heads.
constexpr int64_t kKeysAtOnce = 1 << 14;

}  // namespace

void CausalAttention::run(const Call& call) const {
    const int64_t parts = batch * kv_heads;
    if (parts == 0 || queries == 0) return;
    const int64_t at_once = std::min(parts, std::max<int64_t>(1, kKeysAtOnce / length));
    const Scratch layout = aligned(at_once * layout_bytes());
    for (int64_t first = 0; first < parts; first += at_once) {
        const int64_t count = std::min(at_once, parts - first);
        lay_out(call, first, count, layout.get());
        attend(call, first, count, layout.get());
    }
}

/// Entries that at least one query of a row and KV head sees.
int64_t CausalAttention::seen(int64_t part) const { return std::min(length, before[part / kv_heads] + queries); }

void CausalAttention::lay_out(const Call& call, int64_t first, int64_t count, uint8_t* layout) const {
    call.parallel(static_cast<size_t>(count * tiles()), [&](size_t task) {
        const int64_t part = static_cast<int64_t>(task) / tiles(), tile = static_cast<int64_t>(task) % tiles();
        const int64_t entries = seen(first + part), entry = tile * kPrefillTile;
        if (entry >= entries) return;
        const int64_t here = std::min(kPrefillTile, entries - entry), token = (first + part) * length + entry;
        uint8_t* const target = layout + part * layout_bytes() + tile * kernels.bytes_of_tile(size);
        if (tables.keys.format == VectorFormat::kExact) {
            const auto floats = [token](const Vectors& vectors) {
                return reinterpret_cast<const float*>(from_token(vectors, token).codes);
            };
            kernels.lay_out(floats(tables.keys), floats(tables.values), here, size, target);
            return;
        }
        const Scratch scratch = aligned(2 * here * size * int64_t{sizeof(float)});
        float* const k = reinterpret_cast<float*>(scratch.get());
        float* const v = k + here * size;
        kvc::kernels().widen_vectors(from_token(tables.keys, token), here, k);
        kvc::kernels().widen_vectors(from_token(tables.values, token), here, v);
        kernels.lay_out(k, v, here, size, target);
    });
}

void CausalAttention::attend(const Call& call, int64_t first, int64_t count, const uint8_t* layout) const {
    // Several tiles of queries share each read of the keys.
    const int64_t rows = kPrefillTile * std::max<int64_t>(1, 4 / group);
    const int64_t blocks = (queries + rows - 1) / rows, head = queries * size;
    call.parallel(static_cast<size_t>(count * blocks), [&](size_t task) {
        // The last blocks are the longest and come first, so that no thread waits for a long block at the end.
        const int64_t part = static_cast<int64_t>(task) % count;
        const int64_t row = (blocks - 1 - static_cast<int64_t>(task) / count) * rows;
        const int64_t here = std::min(rows, queries - row), start = (first + part) * group * head;
        const Scratch scratch = aligned(prefill_scratch(here, group, size) * int64_t{sizeof(float)});
        kernels.attend({.q = q + start,
                        .layout = layout + part * layout_bytes(),
                        .o = o + start,
                        .length = seen(first + part),
                        .queries = queries,
                        .before = before[(first + part) / kv_heads],
                        .group = group,
                        .head_size = size,
                        .first_row = row,
                        .rows = here,
                        .scratch = reinterpret_cast<float*>(scratch.get())});
    });
}

}  // namespace kvc
