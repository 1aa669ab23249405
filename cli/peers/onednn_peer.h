// oneDNN as a peer: each expert's rows through one matmul for gate and up and one for down, with
// weights in the layout that the library asks for, on its own OpenMP threads in this process.
#pragma once

#include <memory>
#include <string>

#include "moekit/bench_peer.h"

namespace moekit::cli {

/// `library`: a file, or empty to let the loader look for libdnnl.
std::shared_ptr<BenchPeer> make_onednn_peer(const std::string& library);

}  // namespace moekit::cli
