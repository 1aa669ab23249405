// Span: the time from its construction to its end, as one event of the calling thread's context.
// One relaxed load when no trace is on; no allocation and no lock when one is.
#pragma once

#include "trace/recorder.h"

namespace moekit::trace {

/// Whose spans: one workspace of one rank. Lives as long as its calls.
struct Context {
  Recorder* recorder = nullptr;
  const RankRings* rings = nullptr;
  int32_t workspace = 0;
  int64_t call = 0;

  bool on() const {
    return recorders_on.load(std::memory_order_relaxed) != 0 && recorder != nullptr &&
           recorder->on();
  }
  void push(const Event& event, int thread) const {
    const auto& threads = rings->threads;
    threads[static_cast<size_t>(thread) < threads.size() ? static_cast<size_t>(thread) : 0]->push(
        event);
  }
};

class Span;

/// The context and the innermost span of this thread.
struct Here {
  const Context* context = nullptr;
  Span* span = nullptr;
};
inline Here& here() {
  static thread_local Here place;
  return place;
}

/// The calling thread's context where it is being recorded, else null. Threads of a pool have none:
/// who hands them work passes his own.
inline const Context* current() {
  return recorders_on.load(std::memory_order_relaxed) == 0 ? nullptr : here().context;
}

/// Makes `context` the calling thread's, to the end of the scope.
class Attach {
 public:
  explicit Attach(const Context& context) {
    if (!context.on()) return;
    before_ = here();
    here() = {&context, nullptr};
    attached_ = true;
  }
  ~Attach() {
    if (attached_) here() = before_;
  }
  Attach(const Attach&) = delete;
  Attach& operator=(const Attach&) = delete;

 private:
  Here before_;
  bool attached_ = false;
};

class Span {
 public:
  /// Of the calling thread, thread 0 of its rank.
  explicit Span(Stage stage) : Span(stage, current()) {
    if (context_ == nullptr) return;
    outer_ = here().span;
    here().span = this;
    linked_ = true;
  }
  /// Of thread `thread` of a pool that works for `context` (null: not recorded).
  Span(Stage stage, const Context* context, int thread = 0) : context_(context), thread_(thread) {
    if (context_ == nullptr) return;
    event_.stage = stage;
    event_.begin_ns = context_->recorder->now_ns();
  }
  ~Span() {
    if (context_ == nullptr) return;
    if (linked_) here().span = outer_;
    event_.end_ns = context_->recorder->now_ns();
    event_.call = context_->call;
    event_.workspace = context_->workspace;
    context_->push(event_, thread_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  bool on() const { return context_ != nullptr; }
  /// Written to freely; nobody reads it when the span is off.
  Facts& facts() { return event_.facts; }

 private:
  const Context* context_ = nullptr;
  Span* outer_ = nullptr;
  Event event_;
  int thread_ = 0;
  bool linked_ = false;
};

/// Whether note_moved() has somebody to tell.
inline bool wants_notes() { return current() != nullptr && here().span != nullptr; }

/// Adds to what the innermost span of this thread moved: bytes to other ranks, bytes to its own,
/// rows of both. Nothing without a span. Members that send rows say so inside prepare_send and
/// finalize_send.
inline void note_moved(int64_t bytes, int64_t own_bytes, int64_t rows) {
  if (!wants_notes()) return;
  const auto add = [](int64_t& sum, int64_t more) { sum = (sum < 0 ? 0 : sum) + more; };
  Facts& facts = here().span->facts();
  add(facts.bytes, bytes);
  add(facts.own_bytes, own_bytes);
  add(facts.rows, rows);
}

/// Time in flight: opened by the send, closed by the receive of the same call. Plain bytes.
class Window {
 public:
  void open(const Context& context) { begin_ns_ = context.on() ? context.recorder->now_ns() : -1; }
  void close(const Context& context, Stage stage) {
    if (begin_ns_ < 0 || !context.on()) return;
    Event event;
    event.begin_ns = begin_ns_;
    event.end_ns = context.recorder->now_ns();
    event.stage = stage;
    event.call = context.call;
    event.workspace = context.workspace;
    context.push(event, 0);
    begin_ns_ = -1;
  }

 private:
  int64_t begin_ns_ = -1;
};

}  // namespace moekit::trace
