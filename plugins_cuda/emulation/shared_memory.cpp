#include "emulation/shared_memory.h"

#include "emulation/block.h"
#include "emulation/devices.h"

#include <algorithm>

namespace kvc::emulation {
namespace {

constexpr uint32_t kPattern = 0x7fff7fff;  // NaN as fp32, and as two fp16 or bf16 numbers

size_t round_up(size_t bytes) { return (bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment; }

}  // namespace

void SharedMemory::begin_launch(size_t dynamic_bytes, const SharedLimits& limits) {
    if (!storage_) storage_ = std::make_unique<Granule[]>(kMostShared / kSharedAlignment + 1);
    dynamic_bytes_ = dynamic_bytes;
    static_limit_ = limits.static_bytes;
    limit_ = limits.bytes;
    most_static_bytes_ = 0;
}

void SharedMemory::begin_block() {
    arrays_.clear();
    static_bytes_ = 0;
    poison(storage_.get(), round_up(dynamic_bytes_));
}

void SharedMemory::poison(void* first, size_t bytes) {
    std::fill_n(static_cast<uint32_t*>(first), bytes / sizeof kPattern, kPattern);
}

void* SharedMemory::static_array(const void* key, const char* name, size_t bytes) {
    const size_t begin = round_up(dynamic_bytes_);
    for (const Array& array : arrays_) {
        if (array.key == key) return reinterpret_cast<char*>(storage_.get()) + begin + array.offset;
    }
    const size_t offset = static_bytes_;
    const size_t end = offset + round_up(bytes);
    if (end > static_limit_) {
        current_block->fail("static shared memory grows to " + std::to_string(end) + " bytes with " + name +
                            ", more than " + std::to_string(static_limit_));
    }
    if (dynamic_bytes_ + end > limit_) {
        current_block->fail("static and dynamic shared memory take " + std::to_string(dynamic_bytes_ + end) +
                            " bytes, more than " + std::to_string(limit_));
    }
    arrays_.push_back({key, name, offset, bytes});
    static_bytes_ = end;
    most_static_bytes_ = std::max(most_static_bytes_, end);
    Granule* first = storage_.get() + (begin + offset) / kSharedAlignment;
    poison(first, round_up(bytes));
    return first;
}

void* SharedMemory::dynamic_array(size_t offset, size_t bytes) {
    if (offset > dynamic_bytes_ || bytes > dynamic_bytes_ - offset) {
        current_block->fail("dynamic shared array of " + std::to_string(bytes) + " bytes at offset " +
                            std::to_string(offset) + ", but the launch gave " + std::to_string(dynamic_bytes_));
    }
    return reinterpret_cast<char*>(storage_.get()) + offset;
}

bool SharedMemory::contains(const void* address, size_t bytes) const {
    const auto first = reinterpret_cast<uintptr_t>(storage_.get());
    const auto at = reinterpret_cast<uintptr_t>(address);
    const size_t used = round_up(dynamic_bytes_) + static_bytes_;
    return at >= first && at - first <= used && bytes <= used - (at - first);
}

std::string SharedMemory::describe(const void* address) const {
    const size_t at = static_cast<size_t>(static_cast<const char*>(address) - reinterpret_cast<char*>(storage_.get()));
    const size_t begin = round_up(dynamic_bytes_);
    if (at < begin) return "dynamic shared memory byte " + std::to_string(at);
    const Array& array = array_at(at - begin);
    return std::string("shared array ") + array.name + " byte " + std::to_string(at - begin - array.offset);
}

const SharedMemory::Array& SharedMemory::array_at(size_t offset) const {
    const Array* found = &arrays_.front();
    for (const Array& array : arrays_) {
        if (array.offset <= offset) found = &array;
    }
    return *found;
}

SharedMemory::Place SharedMemory::place_of(const void* address) const {
    if (!contains(address, 0))
        current_block->fail("no shared memory of the block, which another's would correspond to");
    const size_t at = static_cast<size_t>(static_cast<const char*>(address) - reinterpret_cast<char*>(storage_.get()));
    const size_t begin = round_up(dynamic_bytes_);
    if (at < begin) return {nullptr, "", 0, at};
    const Array& array = array_at(at - begin);
    return {array.key, array.name, array.bytes, at - begin - array.offset};
}

void* SharedMemory::at(const Place& place) {
    char* const first = place.key == nullptr ? reinterpret_cast<char*>(storage_.get())
                                             : static_cast<char*>(static_array(place.key, place.name, place.bytes));
    return first + place.offset;
}

}  // namespace kvc::emulation
