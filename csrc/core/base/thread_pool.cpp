// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace diffulex {
namespace {

// Pieces per thread: enough to even out unequal pieces, few enough to keep hand-out cheap.
constexpr int64_t kPiecesPerThread = 4;

/// One parallel loop; its fields are guarded by the mutex of the pool.
struct Loop {
  int64_t next = 0;
  int64_t end = 0;
  int64_t piece = 1;
  ThreadPool::RangeFn body = nullptr;
  void* context = nullptr;
  std::exception_ptr failure;
};

}  // namespace

class ThreadPool::Workers final {
 public:
  explicit Workers(int32_t num_threads) {
    for (int32_t i = 1; i < num_threads; ++i) {
      threads_.emplace_back([this] { work(); });
    }
  }

  ~Workers() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  [[nodiscard]] int32_t num_threads() const noexcept {
    return static_cast<int32_t>(threads_.size()) + 1;
  }

  /// False when another loop is running.
  [[nodiscard]] bool try_run(const Loop& loop) {
    const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) {
      return false;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    loop_ = loop;
    ++generation_;
    wake_.notify_all();
    drain(&lock);
    done_.wait(lock, [this] { return busy_ == 0; });
    const std::exception_ptr failure = loop_.failure;
    loop_ = Loop{};
    lock.unlock();
    if (failure) {
      std::rethrow_exception(failure);
    }
    return true;
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t seen = 0;
    while (true) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) {
        return;
      }
      seen = generation_;
      ++busy_;
      drain(&lock);
      --busy_;
      if (busy_ == 0) {
        done_.notify_one();
      }
    }
  }

  /// Takes pieces until none is left; holds the lock except inside the body.
  void drain(std::unique_lock<std::mutex>* lock) {
    while (loop_.next < loop_.end) {
      const int64_t begin = loop_.next;
      const int64_t end = std::min(loop_.end, begin + loop_.piece);
      loop_.next = end;
      const RangeFn body = loop_.body;
      void* const context = loop_.context;
      lock->unlock();
      std::exception_ptr failure;
      try {
        body(begin, end, context);
      } catch (...) {
        failure = std::current_exception();
      }
      lock->lock();
      if (failure && !loop_.failure) {
        loop_.failure = failure;
        loop_.next = loop_.end;
      }
    }
  }

  std::mutex turn_;  // held by the thread whose loop runs
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Loop loop_;
  int64_t generation_ = 0;
  int32_t busy_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

ThreadPool::ThreadPool(int32_t num_threads) : workers_(std::make_unique<Workers>(num_threads)) {}

ThreadPool::~ThreadPool() = default;

int32_t ThreadPool::num_threads() const noexcept {
  return workers_->num_threads();
}

void ThreadPool::run(int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context) {
  if (begin >= end) {
    return;
  }
  const int64_t pieces = int64_t{num_threads()} * kPiecesPerThread;
  const int64_t piece = std::max({(end - begin + pieces - 1) / pieces, grain, int64_t{1}});
  Loop loop;
  loop.next = begin;
  loop.end = end;
  loop.piece = piece;
  loop.body = body;
  loop.context = context;
  if (num_threads() < 2 || piece >= end - begin || !workers_->try_run(loop)) {
    body(begin, end, context);
  }
}

void ThreadPool::parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFn body,
                              void* context, void* pool) {
  static_cast<ThreadPool*>(pool)->run(begin, end, grain, body, context);
}

}  // namespace diffulex
