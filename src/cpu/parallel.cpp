#include "cpu/parallel.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

namespace dualkv::cpu {

int NumWorkers(int32_t requested, int64_t num_tasks) {
  const int64_t threads = requested > 0 ? requested : std::max(1u, std::thread::hardware_concurrency());
  return static_cast<int>(std::clamp<int64_t>(num_tasks, 1, threads));
}

void RunWorkers(int workers, void (*body)(void* context, int worker), void* context) {
  std::vector<std::jthread> threads;
  threads.reserve(workers - 1);
  for (int worker = 1; worker < workers; ++worker) {
    try {
      threads.emplace_back(body, context, worker);
    } catch (const std::exception&) {
      break;  // no more threads to be had: those that run take all tasks
    }
  }
  body(context, 0);
}

}  // namespace dualkv::cpu
