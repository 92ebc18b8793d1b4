// Why an operation did not succeed. Carried as a value inside the transport; thrown only at its edges.
#pragma once
#include <stdexcept>
#include <string>

namespace delta {

enum class Fault { kInterrupted, kPeerLost, kTimeout, kRefused, kFailed };

struct Failure {
  Fault fault = Fault::kFailed;
  std::string message;
  int rank = -1;  // the lost or refusing rank, if one is to blame
};

struct TransportError : std::runtime_error {
  explicit TransportError(Failure f) : std::runtime_error(f.message), failure(std::move(f)) {}
  Failure failure;
};

}  // namespace delta
