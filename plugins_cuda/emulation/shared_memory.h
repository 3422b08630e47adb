// The shared memory of the running block. No value survives from block to block: it is filled with a pattern
// that reads as NaN in every floating-point type and as a huge number in every integer type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvc::emulation {

struct SharedLimits;

inline constexpr size_t kSharedAlignment = 16;

class SharedMemory {
public:
    void begin_launch(size_t dynamic_bytes, const SharedLimits& limits);
    void begin_block();

    // The array of one declaration: the same storage for every thread of the block. `key` tells declarations apart.
    void* static_array(const void* key, const char* name, size_t bytes);
    void* dynamic_array(size_t offset, size_t bytes);

    // Fills words from `first` on with the pattern.
    static void poison(void* first, size_t bytes);

    // A place in the memory of any block of the launch: an array of several blocks is found by its declaration.
    struct Place {
        const void* key;  // null in dynamic memory
        const char* name;
        size_t bytes;  // of the array
        size_t offset;
    };
    Place place_of(const void* address) const;
    void* at(const Place& place);

    bool contains(const void* address, size_t bytes) const;
    // "row byte 12" of an array declared as row, or "dynamic shared memory byte 12".
    std::string describe(const void* address) const;
    size_t static_bytes() const { return static_bytes_; }
    size_t most_static_bytes() const { return most_static_bytes_; }
    size_t dynamic_bytes() const { return dynamic_bytes_; }

private:
    struct Array {
        const void* key;
        const char* name;
        size_t offset;
        size_t bytes;
    };

    const Array& array_at(size_t offset) const;

    struct alignas(kSharedAlignment) Granule {
        uint32_t words[4];
    };

    std::unique_ptr<Granule[]> storage_;  // kMostShared bytes and a granule: dynamic first, then static
    std::vector<Array> arrays_;
    size_t dynamic_bytes_ = 0;
    size_t static_limit_ = 0;
    size_t limit_ = 0;  // static and dynamic together
    size_t static_bytes_ = 0;
    size_t most_static_bytes_ = 0;
};

}  // namespace kvc::emulation
