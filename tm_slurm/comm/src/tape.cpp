#include "tape.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace delta {
namespace {

bool fits(const Tape::Call& call, const char* name, const std::vector<at::Tensor>& outputs) {
  if (call.name != name || call.outputs.size() != outputs.size()) return false;
  for (size_t i = 0; i < outputs.size(); i++) {
    const at::Tensor& told = call.outputs[i];
    if (!told.defined()) return false;
    if (told.scalar_type() != outputs[i].scalar_type() || told.sizes() != outputs[i].sizes()) return false;
  }
  return true;
}

std::string described(const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  if (!tensors.empty() && tensors[0].defined()) text << tensors[0].scalar_type() << tensors[0].sizes();
  if (tensors.size() > 1) text << " and " << tensors.size() - 1 << " more";
  return text.str();
}

}  // namespace

Tape::Tape(std::vector<Call> calls) : plays_(true), calls_(std::move(calls)) {
  for (size_t place = 0; place < calls_.size(); place++) {
    const Call& call = calls_[place];
    lanes_[call.step][{call.group, call.peer}].places.push_back(place);
    last_step_ = std::max(last_step_, call.step);
  }
}

void Tape::begin_step(int64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!plays_) {
    step_ = step;
    return;
  }
  // Steps beyond the last one that was taken down are taken for that one over again.
  again_ = step > last_step_;
  step_ = std::min(step, last_step_);
  for (auto& [key, lane] : lanes_[step_]) lane.next = 0;
}

size_t Tape::reserve(const char* name, int group, int peer, const std::vector<at::Tensor>& outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!open_) return SIZE_MAX;
  Call call;
  call.step = step_;
  call.name = name;
  call.group = group;
  call.peer = peer;
  call.outputs.resize(outputs.size());
  calls_.push_back(std::move(call));
  return calls_.size() - 1;
}

void Tape::fill(size_t place, const std::vector<at::Tensor>& outputs, int source) {
  at::NoGradGuard no_grad;
  int64_t bytes = 0;
  for (const at::Tensor& output : outputs) bytes += static_cast<int64_t>(output.nbytes());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!open_ || place >= calls_.size()) return;
    if (held_bytes_ + bytes > limit_bytes_) {
      overflowed_ = true;
      open_ = false;
      calls_.clear();
      return;
    }
    held_bytes_ += bytes;
  }
  std::vector<at::Tensor> copies;
  for (const at::Tensor& output : outputs)
    copies.push_back(output.detach().to(at::kCPU).clone(at::MemoryFormat::Contiguous));
  std::lock_guard<std::mutex> lock(mutex_);
  if (!open_ || place >= calls_.size()) return;
  calls_[place].outputs = std::move(copies);
  calls_[place].source = source;
}

std::vector<Tape::Call> Tape::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
  lanes_.clear();
  return std::exchange(calls_, {});
}

bool Tape::overflowed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return overflowed_;
}

int64_t Tape::held_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

bool Tape::answer(const char* name, int group, int peer, const std::vector<at::Tensor>& outputs, int* source) {
  std::lock_guard<std::mutex> lock(mutex_);
  Lane& lane = lanes_[step_][{group, peer}];
  for (size_t at = lane.next; at < lane.places.size(); at++) {
    const Call& call = calls_[lane.places[at]];
    if (!fits(call, name, outputs)) continue;
    if (at > lane.next && !again_) {
      const Call& left_out = calls_[lane.places[lane.next]];
      miss(left_out.name.c_str(), group, left_out.outputs, "was recorded and did not come");
    }
    lane.next = at + 1;
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < outputs.size(); i++) at::Tensor(outputs[i]).copy_(call.outputs[i]);
    *source = call.source;
    answered_++;
    return true;
  }
  miss(name, group, outputs, "was not recorded");
  return false;
}

void Tape::miss(const char* name, int group, const std::vector<at::Tensor>& outputs, const char* why) {
  if (missed_++) return;
  std::ostringstream text;
  text << "step " << step_ << ", group " << group << ": " << (name + 3) << " of " << described(outputs) << " " << why;
  first_miss_ = text.str();
}

int64_t Tape::answered() {
  std::lock_guard<std::mutex> lock(mutex_);
  return answered_;
}

int64_t Tape::missed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return missed_;
}

std::string Tape::first_miss() {
  std::lock_guard<std::mutex> lock(mutex_);
  return first_miss_;
}

}  // namespace delta
