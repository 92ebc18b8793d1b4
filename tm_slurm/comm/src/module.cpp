// Python's view: the endpoint and a factory for backends. Everything that may block runs without Python's lock.
#include <pybind11/chrono.h>
#include <torch/extension.h>

#include "backend.hpp"
#include "errors.hpp"
#include "inner_backend.hpp"

namespace py = pybind11;

namespace delta {
namespace {

using AddressTuple = std::tuple<std::string, int, uint64_t>;
using AddressTable = std::map<int, AddressTuple>;

std::map<int, Address> table(const AddressTable& given) {
  std::map<int, Address> out;
  for (const auto& [rank, address] : given)
    out[rank] = Address{std::get<0>(address), static_cast<uint16_t>(std::get<1>(address)), std::get<2>(address)};
  return out;
}

c10::intrusive_ptr<c10d::Backend> make_backend(const std::shared_ptr<Endpoint>& endpoint, const std::string& name,
                                               uint64_t id, int rank, const std::vector<int>& ranks, double timeout_s,
                                               int ordinal) {
  auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  return c10::make_intrusive<DeltaBackend>(endpoint, name, id, rank, ranks, timeout, ordinal);
}

using CallTuple = std::tuple<int64_t, std::string, int, int, int, std::vector<std::optional<at::Tensor>>>;

std::vector<Tape::Call> calls_of(const std::vector<CallTuple>& given) {
  std::vector<Tape::Call> calls;
  for (const auto& [step, name, group, peer, source, outputs] : given) {
    Tape::Call call{step, name, group, peer, source, {}};
    for (const auto& output : outputs) call.outputs.push_back(output.value_or(at::Tensor()));
    calls.push_back(std::move(call));
  }
  return calls;
}

std::vector<CallTuple> tuples_of(std::vector<Tape::Call> calls) {
  std::vector<CallTuple> out;
  for (Tape::Call& call : calls) {
    std::vector<std::optional<at::Tensor>> outputs;
    for (at::Tensor& output : call.outputs)
      outputs.push_back(output.defined() ? std::optional<at::Tensor>(output) : std::nullopt);
    out.emplace_back(call.step, call.name, call.group, call.peer, call.source, std::move(outputs));
  }
  return out;
}

}  // namespace
}  // namespace delta

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using delta::Endpoint;
  using Release = py::call_guard<py::gil_scoped_release>;

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const delta::TransportError& error) {
      try {
        std::rethrow_exception(delta::to_exception(error.failure));
      } catch (torch::PyTorchError& translated) {
        PyErr_SetString(translated.python_type(), translated.what());
      }
    } catch (torch::PyTorchError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });

  m.def("set_errors", [](py::object interrupted, py::object peer_lost, py::object timeout, py::object refused) {
    delta::set_python_errors(interrupted.ptr(), peer_lost.ptr(), timeout.ptr(), refused.ptr());
  });
  m.def("make_backend", &delta::make_backend, Release(), py::arg("endpoint"), py::arg("name"), py::arg("id"),
        py::arg("rank"), py::arg("ranks"), py::arg("timeout_s"), py::arg("ordinal") = 0);
  m.attr("UNRECORDED_TAG") = delta::kUnrecordedTag;

  using delta::Tape;
  py::class_<Tape, std::shared_ptr<Tape>>(m, "Tape")
      .def_static("recorder", [](int64_t limit_bytes) { return std::make_shared<Tape>(limit_bytes); })
      .def_static("player", [](const std::vector<delta::CallTuple>& calls) {
        return std::make_shared<Tape>(delta::calls_of(calls));
      })
      .def("begin_step", &Tape::begin_step, Release())
      .def("take", [](Tape& tape) { return delta::tuples_of(tape.take()); })
      .def("forget", [](Tape& tape) { tape.take(); }, Release())
      .def_property_readonly("overflowed", &Tape::overflowed)
      .def_property_readonly("held_bytes", &Tape::held_bytes)
      .def_property_readonly("answered", &Tape::answered)
      .def_property_readonly("missed", &Tape::missed)
      .def_property_readonly("first_miss", &Tape::first_miss);

  using delta::InnerBackend;
  py::class_<InnerBackend, c10d::Backend, c10::intrusive_ptr<InnerBackend>>(m, "InnerBackend")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> inner, const std::string& name, int rank, int size, bool shield) {
             return c10::make_intrusive<InnerBackend>(std::move(inner), name, rank, size, shield);
           }),
           py::kw_only(), py::arg("inner"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("shield"))
      .def("swap", &InnerBackend::swap, Release())
      .def("interrupt", &InnerBackend::interrupt, Release())
      .def("answer_with", &InnerBackend::answer_with, py::arg("alone").none(true), Release())
      .def("inner", &InnerBackend::inner, Release());

  py::class_<Endpoint, std::shared_ptr<Endpoint>>(m, "Endpoint")
      .def(py::init([](py::bytes secret, const std::string& job, const std::string& host, uint64_t incarnation,
                       double timeout_s, double keepalive_s) {
             std::string key = secret;
             py::gil_scoped_release release;
             return std::shared_ptr<Endpoint>(new Endpoint(key, job, host, incarnation, timeout_s, keepalive_s),
                                              [](Endpoint* endpoint) {
                                                // The last owner may hold Python's lock; the threads may want it.
                                                if (PyGILState_Check()) {
                                                  py::gil_scoped_release unlocked;
                                                  delete endpoint;
                                                } else {
                                                  delete endpoint;
                                                }
                                              });
           }),
           py::kw_only(), py::arg("secret"), py::arg("job"), py::arg("host"), py::arg("incarnation"),
           py::arg("timeout_s"), py::arg("keepalive_s"))
      .def_property_readonly("port", &Endpoint::port)
      .def_property(
          "sandbox", [](const Endpoint& e) { return e.sandbox.load(); },
          [](Endpoint& e, bool value) { e.sandbox.store(value); })
      .def("attach", &Endpoint::attach, py::arg("tape").none(true), Release())
      .def("share_sandbox", &Endpoint::share_sandbox, Release())
      .def("why_alone", &Endpoint::why_alone, Release())
      .def_property_readonly("has_tape", [](const Endpoint& e) { return e.tape.load() != nullptr; })
      .def(
          "configure",
          [](Endpoint& e, int rank, uint32_t epoch, uint64_t term, const delta::AddressTable& peers,
             const std::set<int>& absent) { e.configure(rank, epoch, term, delta::table(peers), absent); },
          Release())
      .def(
          "prepare",
          [](Endpoint& e, uint32_t epoch, const delta::AddressTable& changes, const std::set<int>& absent) {
            e.prepare(epoch, delta::table(changes), absent);
          },
          Release())
      .def("update", [](Endpoint& e, uint32_t epoch, const delta::AddressTable& peers) { e.update(epoch, delta::table(peers)); }, Release())
      .def("dial", &Endpoint::dial, Release())
      .def("wait_staged", &Endpoint::wait_staged, Release())
      .def("cancel", &Endpoint::cancel, Release())
      .def("switch", &Endpoint::switch_to, Release())
      .def("interrupt", &Endpoint::interrupt, Release())
      .def("linked", &Endpoint::linked, Release())
      .def("stats", &Endpoint::stats, Release())
      .def("close", &Endpoint::close, Release());
}
