#include "comm/message_links.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace moekit::comm {
namespace {

constexpr int64_t kHeader = sizeof(FrameHeader);
constexpr int64_t kSmallPayload = 512 - kHeader;
constexpr int64_t kLastPayload = 2048 - kHeader;
constexpr int64_t kLargestPayload = int64_t{64} << 10;
constexpr int64_t kSmallestPayload = int64_t{4} << 10;
constexpr int64_t kAllBuffers = int64_t{64} << 20;
constexpr int kSmallPlaces = 8, kLargePlaces = 4;
constexpr auto kLastTime = std::chrono::milliseconds(300);

// Streams of a pair, a tag each. A frame goes through the stream whose messages are not much larger
// than it; sequence numbers keep the frames of both in order.
enum StreamKind { kSmall = 0, kLarge = 1, kLast = 2, kNumStreams = 3 };
static_assert(kNumStreams == MessageLinks::kTags);

int64_t large_payload(size_t num_peers) {
  const auto peers = static_cast<int64_t>(std::max<size_t>(1, num_peers));
  return std::clamp(kAllBuffers / peers / (2 * kLargePlaces), kSmallestPayload, kLargestPayload);
}

}  // namespace

class MessageLinks::PeerLink final : public Link {
 public:
  explicit PeerLink(int64_t large_payload)
      : streams_{Stream(kSmallPayload, kSmallPlaces), Stream(large_payload, kLargePlaces),
                 Stream(kLastPayload, 1)} {}

  void connect(MessageLinks& links, int peer, int first_tag) {
    messages_ = links.messages_.get();
    for (int s = 0; s < kNumStreams; ++s) {
      Stream& stream = streams_[s];
      const int64_t bytes = kHeader + stream.payload;
      for (int p = 0; p < stream.places; ++p) {
        Place& out = stream.out[p];
        out.operation =
            messages_->add_send(peer, first_tag + s, out.memory.get(), bytes, s != kLast);
        links.own(out.operation, {this, s, p, true});
        Place& in = stream.in[p];
        in.operation = messages_->add_receive(peer, first_tag + s, in.memory.get(), bytes);
        links.own(in.operation, {this, s, p, false});
      }
      for (Place& in : stream.in) messages_->start(in.operation);
    }
  }

  void ended(const Owner& owner) {
    Stream& stream = streams_[owner.stream];
    if (owner.outgoing) {
      stream.out[owner.place].busy = false;
    } else {
      stream.in[owner.place].busy = true;
    }
  }

  int64_t try_send(const FrameHeader& header, const void* payload, int64_t bytes) override {
    const int s = bytes <= kSmallPayload ? kSmall : kLarge;
    const int64_t taken = post(s, header, payload, bytes, next_sequence_);
    if (taken >= 0) ++next_sequence_;
    return taken;
  }

  const FrameHeader* front() override {
    for (const int s : {kSmall, kLarge}) {
      const Place& place = streams_[s].in[streams_[s].taken % streams_[s].places];
      if (place.busy && place.header()->sequence == expected_sequence_) {
        front_ = s;
        return place.header();
      }
    }
    return nullptr;
  }

  void pop() override {
    Stream& stream = streams_[front_];
    Place& place = stream.in[stream.taken % stream.places];
    ++stream.taken;
    ++expected_sequence_;
    place.busy = false;
    messages_->start(place.operation);
  }

  void send_last(FrameKind kind, ErrorCode code, std::string_view reason) {
    FrameHeader header;
    header.kind = kind;
    header.operation_kind = static_cast<uint32_t>(code);
    post(kLast, header, reason.data(), static_cast<int64_t>(reason.size()), 0);
  }

  /// What came as the peer's last word, if it is of this kind.
  const FrameHeader* last(FrameKind kind) const {
    const Place& place = streams_[kLast].in[0];
    return place.busy && place.header()->kind == kind ? place.header() : nullptr;
  }

  bool settled(int stream) const {
    return std::none_of(streams_[stream].out.begin(), streams_[stream].out.end(),
                        [](const Place& place) { return place.busy; });
  }

 private:
  struct Place {
    std::unique_ptr<std::byte[]> memory;
    int operation = -1;
    bool busy = false;  // out: under way; in: holds a frame

    const FrameHeader* header() const { return reinterpret_cast<FrameHeader*>(memory.get()); }
  };

  struct Stream {
    Stream(int64_t payload, int places)
        : payload(payload), places(places), out(make(payload, places)), in(make(payload, places)) {}

    static std::vector<Place> make(int64_t payload, int places) {
      std::vector<Place> made(static_cast<size_t>(places));
      for (Place& place : made) {
        place.memory = std::make_unique<std::byte[]>(static_cast<size_t>(kHeader + payload));
      }
      return made;
    }

    int64_t payload;
    int places;
    std::vector<Place> out, in;
    uint32_t sent = 0, taken = 0;
  };

  int64_t post(int s, const FrameHeader& header, const void* payload, int64_t bytes,
               uint32_t sequence) {
    Stream& stream = streams_[s];
    Place& place = stream.out[stream.sent % stream.places];
    if (place.busy) return -1;
    const int64_t taken = std::min(bytes, stream.payload);
    FrameHeader written = header;
    written.bytes = static_cast<uint32_t>(taken);
    written.sequence = sequence;
    std::memcpy(place.memory.get(), &written, sizeof(written));
    if (taken > 0) std::memcpy(place.memory.get() + kHeader, payload, static_cast<size_t>(taken));
    ++stream.sent;
    place.busy = true;
    messages_->start(place.operation);
    return taken;
  }

  Stream streams_[kNumStreams];
  Messages* messages_ = nullptr;
  uint32_t next_sequence_ = 0, expected_sequence_ = 0;
  int front_ = kSmall;
};

MessageLinks::MessageLinks(std::unique_ptr<Messages> messages, std::span<const int> peers,
                           int first_tag)
    : messages_(std::move(messages)) {
  const int64_t payload = large_payload(peers.size());
  for (const int peer : peers) {
    links_.push_back(std::make_unique<PeerLink>(payload));
    links_.back()->connect(*this, peer, first_tag);
  }
}

MessageLinks::~MessageLinks() {
  if (messages_->end()) return;
  for (auto& link : links_) static_cast<void>(link.release());  // its buffers have to stay
}

void MessageLinks::own(int operation, Owner owner) {
  const auto index = static_cast<size_t>(operation);
  if (owners_.size() <= index) owners_.resize(index + 1);
  owners_[index] = owner;
}

Link* MessageLinks::link(size_t index) const { return links_[index].get(); }

bool MessageLinks::poll() {
  const std::span<const int> ended = messages_->poll();
  for (const int operation : ended) {
    const Owner& owner = owners_[static_cast<size_t>(operation)];
    owner.link->ended(owner);
  }
  return !ended.empty();
}

void MessageLinks::send_failure(ErrorCode code, std::string_view reason) noexcept {
  try {
    for (auto& link : links_) link->send_last(FrameKind::failure, code, reason);
    const auto until = std::chrono::steady_clock::now() + kLastTime;
    auto under_way = [](const auto& link) { return !link->settled(kLast); };
    while (std::any_of(links_.begin(), links_.end(), under_way) &&
           std::chrono::steady_clock::now() < until) {
      if (!poll()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (...) {  // the messages themselves failed: peers end at their deadlines
    return;
  }
}

std::optional<std::pair<ErrorCode, std::string>> MessageLinks::failure() const {
  for (const auto& link : links_) {
    const FrameHeader* frame = link->last(FrameKind::failure);
    if (frame == nullptr) continue;
    const size_t bytes = std::min<size_t>(frame->bytes, kLastPayload);
    return std::pair(static_cast<ErrorCode>(frame->operation_kind),
                     std::string(reinterpret_cast<const char*>(frame + 1), bytes));
  }
  return std::nullopt;
}

void MessageLinks::send_goodbye() {
  for (auto& link : links_) link->send_last(FrameKind::goodbye, ErrorCode::ok, {});
}

bool MessageLinks::has_left(size_t index) const {
  return links_[index]->last(FrameKind::goodbye) != nullptr;
}

bool MessageLinks::settled() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& link) {
    return link->settled(kLarge) && link->settled(kSmall);
  });
}

bool MessageLinks::has_taken_payload(size_t index) const { return links_[index]->settled(kLarge); }

}  // namespace moekit::comm
