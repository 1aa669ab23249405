// A MoE layer over processes that the program starts itself, without MPI: all that moekit needs
// from it is one collective call, here an allgather over socket pairs with rank 0 in the middle.
//   own_bootstrap MODEL_DIR [LAYER]
#include <moekit/moekit.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kRanks = 3;
constexpr int64_t kTokens = 6;  // of each rank

void send_all(int socket, const void* data, size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent <= 0) throw moekit::Error(moekit::ErrorCode::comm, "bootstrap: a peer is gone");
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
}

void receive_all(int socket, void* data, size_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t got = recv(socket, at, bytes, 0);
    if (got <= 0) throw moekit::Error(moekit::ErrorCode::comm, "bootstrap: a peer is gone");
    at += got;
    bytes -= static_cast<size_t>(got);
  }
}

// Rank 0 has a socket to each other rank, every other rank has one to rank 0.
moekit::Bootstrap bootstrap_of(int rank, const std::vector<int>& sockets) {
  moekit::Bootstrap bootstrap;
  bootstrap.rank = rank;
  bootstrap.size = kRanks;
  bootstrap.allgather = [rank, sockets](const void* send, void* recv, int64_t bytes) {
    const auto part = static_cast<size_t>(bytes);
    if (rank != 0) {
      send_all(sockets[0], send, part);
      receive_all(sockets[0], recv, part * kRanks);
      return;
    }
    char* all = static_cast<char*>(recv);
    std::memcpy(all, send, part);
    for (size_t r = 1; r < kRanks; ++r) receive_all(sockets[r - 1], all + r * part, part);
    for (size_t r = 1; r < kRanks; ++r) send_all(sockets[r - 1], all, part * kRanks);
  };
  return bootstrap;
}

std::vector<float> run(const moekit::Layer& layer, int rank) {
  const int64_t hidden = layer.config().hidden;
  std::vector<float> x(static_cast<size_t>(kTokens * hidden)), y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(0.37f * static_cast<float>(i) + static_cast<float>(rank));
  }
  moekit::LayerArgs args;
  args.hidden = moekit::TensorView::contiguous(x.data(), moekit::DType::f32, {kTokens, hidden});
  args.output = moekit::TensorView::contiguous(y.data(), moekit::DType::f32, {kTokens, hidden});
  layer.run(args);
  return y;
}

// 0 when this rank's share has the bits that one rank with all experts gives.
int run_rank(const std::string& model, int index, int rank, const std::vector<int>& sockets) {
  try {
    moekit::PlanOptions alone;
    alone.max_tokens = kTokens;
    moekit::PlanOptions options = alone;
    options.comm = moekit::make_process_ranks(bootstrap_of(rank, sockets));
    const std::vector<float> y = run(moekit::Layer::open(model, index, options), rank);
    const std::vector<float> expected = run(moekit::Layer::open(model, index, alone), rank);
    return std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) == 0 ? 0 : 1;
  } catch (const moekit::Error& e) {
    std::fprintf(stderr, "rank %d: %s: %s\n", rank, to_string(e.code()), e.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s MODEL_DIR [LAYER]\n", argv[0]);
    return 2;
  }
  const std::string model = argv[1];
  const int index = argc > 2 ? std::atoi(argv[2]) : -1;
  // Fork before anything starts threads; a real program would start ranks by its own launcher.
  std::vector<int> sockets;
  std::vector<pid_t> children;
  for (int rank = 1; rank < kRanks; ++rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return EXIT_FAILURE;
    const pid_t child = fork();
    if (child == 0) {
      for (const int other : sockets) close(other);
      close(pair[0]);
      _exit(run_rank(model, index, rank, {pair[1]}));
    }
    close(pair[1]);
    sockets.push_back(pair[0]);
    children.push_back(child);
  }
  int failures = run_rank(model, index, 0, sockets);
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failures += status != 0;
  }
  std::printf("%d ranks of %d give the same bits as one\n", kRanks - failures, kRanks);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
