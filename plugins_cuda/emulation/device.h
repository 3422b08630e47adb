// The host side of kernels/platform.cuh: everything that a kernel body may name, for g++.
#pragma once

#include "emulation/builtins.h"
#include "emulation/cluster.h"
#include "emulation/launch.h"
#include "emulation/numeric_types.h"
#include "emulation/ptx.h"
#include "emulation/shared_array.h"
#include "emulation/vector_types.h"
