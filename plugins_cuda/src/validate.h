// Host-side checks of the parameter structs, made before anything is launched or written.
//
// Each function throws Error with one line: the field, its value, and the allowed values. The ranges are those of the
// comments in include/kvc; tests/plugins_cuda/test_bad_numbers.py tries every one of them.
#pragma once

#include "kvc/kvc.h"
#include "src/error.h"

namespace kvc {

/// Checks the fields that sizes follow from: ranges, divisibility, and that every tensor's bytes fit an int64. A
/// workspace query makes these checks; pointers may be anything.
void validate_sizes(const KvcCompactParams* params);
void validate_sizes(const KvcCompactTurnParams* params);
void validate_sizes(const KvcHybridAttentionParams* params);
void validate_sizes(const KvcDenseAttentionParams* params);
void validate_sizes(const KvcRotatedHybridAttentionParams* params);
void validate_sizes(const KvcRotatedDenseAttentionParams* params);
void validate_sizes(const KvcAppendBlockParams* params);
void validate_sizes(const KvcRaiseBoundsParams* params);
void validate_sizes(const KvcJoinBlockParams* params);
void validate_sizes(const KvcReplaceCacheParams* params);
void validate_sizes(const KvcReplaceBoundsParams* params);

/// Checks all fields: the sizes, then the addresses (null, alignment, overlap of written memory with anything else).
void validate(const KvcCompactParams* params);
void validate(const KvcCompactTurnParams* params);
void validate(const KvcHybridAttentionParams* params);
void validate(const KvcDenseAttentionParams* params);
void validate(const KvcRotatedHybridAttentionParams* params);
void validate(const KvcRotatedDenseAttentionParams* params);
void validate(const KvcAppendBlockParams* params);
void validate(const KvcRaiseBoundsParams* params);
void validate(const KvcJoinBlockParams* params);
void validate(const KvcReplaceCacheParams* params);
void validate(const KvcReplaceBoundsParams* params);
void validate(const KvcPrefetchParams* params);

/// Checks a scratch buffer of `bytes` bytes where the call needs `needed`.
void validate_workspace(const void* workspace, uint64_t bytes, uint64_t needed);

/// Checks the place where a workspace query writes its result.
void validate_result(const uint64_t* bytes);

/// True if the compaction overwrites k and v: its caches are k and v themselves. For validated parameters.
bool compacts_in_place(const KvcCompactParams& params);

}  // namespace kvc
