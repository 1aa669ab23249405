// gate_up and down of smxx_decode over fp8_block weights; api.h's functions come here.
#pragma once

#include "kernels/smxx_decode/api.h"

namespace moekit::kernels::smxx_decode {

/// Whether shared memory of the current GPU has room for gate_up's rings beside the rows.
cudaError_t fp8_ring_fits(const Args& args, bool& fits);
/// Only where they fit.
cudaError_t fp8_gate_up(const Args& args, cudaStream_t stream, bool overlap);
cudaError_t fp8_down(const Args& args, cudaStream_t stream, bool overlap);

}  // namespace moekit::kernels::smxx_decode
