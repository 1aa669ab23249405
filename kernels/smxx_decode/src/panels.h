// gate_up and down of smxx_decode over weight panels; api.h's functions come here.
#pragma once

#include "kernels/smxx_decode/api.h"

namespace moekit::kernels::smxx_decode {

cudaError_t panel_gate_up(const Args& args, cudaStream_t stream, bool overlap);
cudaError_t panel_down(const Args& args, cudaStream_t stream, bool overlap);

}  // namespace moekit::kernels::smxx_decode
