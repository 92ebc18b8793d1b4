// A coroutine that runs one collective. It is cancelled by destroying it: its transfers unregister themselves.
#pragma once
#include <coroutine>
#include <exception>
#include <utility>

namespace delta {

class Task {
 public:
  struct promise_type {
    std::coroutine_handle<> continuation = nullptr;
    std::exception_ptr error;

    Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    struct Final {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
        auto next = self.promise().continuation;
        return next ? next : std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    Final final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };

  Task() = default;
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }
  ~Task() { reset(); }

  void reset() {
    if (auto handle = std::exchange(handle_, nullptr)) handle.destroy();
  }
  std::coroutine_handle<> handle() const { return handle_; }
  bool done() const { return !handle_ || handle_.done(); }
  void rethrow() const {
    if (handle_ && handle_.promise().error) std::rethrow_exception(handle_.promise().error);
  }

  // A coroutine may await another: it runs at once and its exception comes out here.
  struct Awaiter {
    const Task* task;
    bool await_ready() const noexcept { return task->done(); }
    std::coroutine_handle<> await_suspend(std::coroutine_handle<> waiting) noexcept {
      task->handle_.promise().continuation = waiting;
      return task->handle_;
    }
    void await_resume() const { task->rethrow(); }
  };
  Awaiter operator co_await() const noexcept { return {this}; }

 private:
  std::coroutine_handle<promise_type> handle_ = nullptr;
};

}  // namespace delta
