// Small problems for tests that cross back-ends: every weight and activation format, sizes that no
// block or tile divides, every activation function, biases, shared experts, latent width, idle and
// hot experts.
#pragma once

#include <string>
#include <vector>

namespace moekit::test {

/// SPECs of small layers (at most 16 experts, sizes below 400), each unlike the others in one
/// respect.
const std::vector<std::string>& small_problems();

/// Every weight format over one odd-sized layer.
std::vector<std::string> problems_of_every_weight_format();

/// Every activation scheme over one odd-sized layer.
std::vector<std::string> problems_of_every_activation_format();

}  // namespace moekit::test
