// How failures become Python exceptions, also when they come out of autograd or a future.
#pragma once
#include <exception>

#include "failure.hpp"

struct _object;

namespace delta {

// The Python classes (borrowed for ever), one for each kind of failure.
void set_python_errors(_object* interrupted, _object* peer_lost, _object* timeout, _object* refused);
std::exception_ptr to_exception(const Failure& failure);

}  // namespace delta
