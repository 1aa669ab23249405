// torch as a peer: its grouped product, in a Python process of its own with as many threads.
#pragma once

#include <memory>
#include <string>

#include "moekit/bench_peer.h"

namespace moekit::cli {

/// `python`: a program, or empty for python3 on PATH and then .venv/bin/python of the working
/// directory, whichever has torch.
std::shared_ptr<BenchPeer> make_torch_peer(const std::string& python);

}  // namespace moekit::cli
