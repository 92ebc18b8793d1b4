#include "errors.hpp"

#include <torch/csrc/Exceptions.h>

namespace delta {
namespace {

PyObject* classes[4] = {nullptr, nullptr, nullptr, nullptr};

// torch translates any PyTorchError that comes out of its bindings into the class that it names.
struct GroupError final : torch::PyTorchError {
  explicit GroupError(const Failure& f) : PyTorchError(f.message), fault(f.fault) {}
  PyObject* python_type() override {
    auto index = static_cast<size_t>(fault);
    return index < 4 && classes[index] ? classes[index] : PyExc_RuntimeError;
  }
  Fault fault;
};

}  // namespace

void set_python_errors(PyObject* interrupted, PyObject* peer_lost, PyObject* timeout, PyObject* refused) {
  PyObject* given[4] = {interrupted, peer_lost, timeout, refused};
  for (size_t i = 0; i < 4; i++) {
    Py_INCREF(given[i]);
    classes[i] = given[i];
  }
}

std::exception_ptr to_exception(const Failure& failure) { return std::make_exception_ptr(GroupError(failure)); }

}  // namespace delta
