// Threads of the CPU backend: started for a call and joined at its end. A call works for milliseconds and a
// thread starts in some 20 microseconds; in return there is no pool that a fork could leave without threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace dualkv::cpu {

// Threads to use for `num_tasks` tasks when the caller asks for `requested` (0: one for each core). At
// least 1.
int NumWorkers(int32_t requested, int64_t num_tasks);

// Runs body(worker) for worker = 0 to workers - 1 at the same time; 0 is the calling thread. Bodies must not
// throw, and must not rely on all of them running: where the system denies a thread, its worker is left out.
void RunWorkers(int workers, void (*body)(void* context, int worker), void* context);

// Runs body(worker, task) for every task, handed out in order to the workers as they become free.
template <class Body>
void ParallelFor(int workers, int64_t num_tasks, Body&& body) {
  struct Context {
    Body& body;
    int64_t num_tasks;
    std::atomic<int64_t> next{0};
  } context{body, num_tasks};
  RunWorkers(
      static_cast<int>(std::min<int64_t>(workers, std::max<int64_t>(num_tasks, 1))),
      [](void* opaque, int worker) {
        auto& shared = *static_cast<Context*>(opaque);
        for (int64_t task; (task = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.num_tasks;) {
          shared.body(worker, task);
        }
      },
      &context);
}

}  // namespace dualkv::cpu
