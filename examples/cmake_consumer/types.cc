// Code that describes layers without running them needs no library.
#include <moekit/config.h>

#if __cplusplus < 202002L
#error "the headers of moekit need C++20; target_compile_features(... cxx_std_20) asks for it"
#endif

int64_t elements_of_an_expert(const moekit::MoeConfig& config) {
  return (config.activation.gated ? 3 : 2) * config.routed_width() * config.inter;
}
