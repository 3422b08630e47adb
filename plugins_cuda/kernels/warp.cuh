// The size of a warp, for the kernels and for the emulation that runs them.
#pragma once

namespace kvc {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;  // the mask of all lanes

}  // namespace kvc
