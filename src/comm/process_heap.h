// The symmetric heap of ranks that are processes: a shared window on an island, messages beyond it.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/process_engine.h"
#include "comm/process_group.h"
#include "comm/symmetric_heap.h"
#include "comm/thread_heap.h"

namespace moekit::comm {

/// Collective over `rendezvous`, which is the group of `engine`.
std::unique_ptr<SymmetricHeap> make_process_heap(std::shared_ptr<ProcessEngine> engine,
                                                 const Rendezvous& rendezvous, HeapSize size);

}  // namespace moekit::comm
