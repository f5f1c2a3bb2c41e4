// Threads on cores of their own. Where all cores are used and a neighbour computes on one of them, the system tends to
// put two threads onto the core that is free, and leaves the other to the neighbour.
#pragma once
#include <omp.h>

#include <cstdint>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace batchinfer {

#ifdef __linux__
// By the number of a thread: the CPUs of its core. Empty: threads are not bound.
static std::vector<cpu_set_t> cores_of_threads;
static int binding = 0;  // counts changes of it

static void bind_threads(const int32_t* core_of_cpu, int num_cpus) {
  cores_of_threads.clear(), binding++;
  for (int cpu = 0; cpu < num_cpus; cpu++) {
    const int core = core_of_cpu[cpu];
    if (core < 0 || cpu >= CPU_SETSIZE) continue;
    while ((int)cores_of_threads.size() <= core) CPU_ZERO(&cores_of_threads.emplace_back());
    CPU_SET(cpu, &cores_of_threads[core]);
  }
}

// While it lives, the calling thread stays on the first core, and the others that work for it on theirs; these stay
// there, as they do nothing else. The caller is let go: threads that it starts would inherit its place.
class OnItsCore {
 public:
  OnItsCore() {
    const int threads = omp_get_max_threads();
    if (threads < 2 || threads != (int)cores_of_threads.size()) return;
    if (sched_getaffinity(0, sizeof before_, &before_)) return;
    // Each time: a thread that is new has its place from the one that started it.
#pragma omp parallel
    if (int thread = omp_get_thread_num()) {
      thread_local int bound_to = -1, bound_in = -1;
      if (bound_to != thread || bound_in != binding) sched_setaffinity(0, sizeof(cpu_set_t), &cores_of_threads[thread]);
      bound_to = thread, bound_in = binding;
    }
    // Fails where the mask has become another meanwhile: then the thread stays where it may be.
    is_bound_ = !sched_setaffinity(0, sizeof(cpu_set_t), &cores_of_threads[0]);
  }
  ~OnItsCore() {
    if (is_bound_) sched_setaffinity(0, sizeof before_, &before_);
  }
  OnItsCore(const OnItsCore&) = delete;

 private:
  cpu_set_t before_;
  bool is_bound_ = false;
};
#else
static void bind_threads(const int32_t*, int) {}
struct OnItsCore {};
#endif

}  // namespace batchinfer
