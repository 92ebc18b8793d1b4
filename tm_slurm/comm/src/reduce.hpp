// Element-wise reductions by type and operator.
#pragma once
#include <c10/core/ScalarType.h>

#include "transfer.hpp"

namespace delta {

enum class ReduceKind { kSum, kProduct, kMin, kMax, kAnd, kOr, kXor };

// The kernel for a type and an operator, or one with apply == nullptr if that has no meaning (bits of floats, order of
// complex numbers).
Reduction reduction_for(c10::ScalarType type, ReduceKind kind);

}  // namespace delta
