// Bounds of pages: for each channel the largest key of the page, and the largest of the negative keys.
#pragma once

#include <cstdint>

namespace kvc {

/// The bounds of all pages of one row and KV head, [2 head_size, pages]: floats, or fp8 (E5M2) codes rounded up
/// (kvc_trt/operators/fp8_bounds.py).
class PageBounds {
public:
    /// Pages of a cache of `capacity` slots; rows of fp8 bounds fill whole vectors.
    static int64_t pages_of(int64_t capacity, int64_t page_size, bool fp8);

    PageBounds(void* first, bool fp8, int64_t head_size, int64_t pages)
        : first_(first), fp8_(fp8), size_(head_size), pages_(pages) {}

    /// The bounds `number` rows and KV heads further on.
    PageBounds at(int64_t number) const;
    const void* data() const { return first_; }

    /// Lets a page cover a key [head_size] too. NaN enters a bound and stays, as in the reference; in fp8 it is the
    /// largest number.
    void raise(int64_t page, const float* key) const;

    /// Sets a page to the maxima of `count` keys [count, head_size]; of none, to the lowest number.
    void set(int64_t page, const float* keys, int64_t count) const;

private:
    void* first_;
    bool fp8_;
    int64_t size_, pages_;
};

}  // namespace kvc
