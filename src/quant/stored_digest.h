// Fingerprint of stored weights: their bytes and everything that says how to read them.
#pragma once

#include "base/digest.h"
#include "quant/stored_matrix.h"

namespace moekit::quant {

/// Adds content and conventions of `matrix`: two matrices that decode differently differ here.
/// Strides are not part of it, so that the same weights in another file order agree. An empty
/// matrix counts as such.
void add(Digester& digester, const StoredMatrix& matrix);
void add(Digester& digester, const StoredVector& vector);
Digest digest_of(const StoredExpert& expert);

}  // namespace moekit::quant
