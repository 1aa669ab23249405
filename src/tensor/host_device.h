// MOEKIT_HOST_DEVICE: marks the functions that host and device code share, so that both run the
// same sequence of operations.
#pragma once

#if defined(__CUDACC__)
#define MOEKIT_HOST_DEVICE __host__ __device__
#else
#define MOEKIT_HOST_DEVICE
#endif
