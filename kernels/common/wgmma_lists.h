// Operand lists of wgmma's inline assembly: registers %0, %1, ... of the sums, and their
// constraints from element `i` of `d` on.
#pragma once

// clang-format off
#define MOEKIT_WGMMA_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOEKIT_WGMMA_REGISTERS_16 \
  MOEKIT_WGMMA_REGISTERS_8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOEKIT_WGMMA_REGISTERS_32 \
  MOEKIT_WGMMA_REGISTERS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOEKIT_WGMMA_REGISTERS_64 \
  MOEKIT_WGMMA_REGISTERS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOEKIT_WGMMA_REGISTERS_128 \
  MOEKIT_WGMMA_REGISTERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define MOEKIT_WGMMA_SUMS_8(d, i) \
  "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), \
  "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define MOEKIT_WGMMA_SUMS_16(d, i) MOEKIT_WGMMA_SUMS_8(d, i), MOEKIT_WGMMA_SUMS_8(d, (i) + 8)
#define MOEKIT_WGMMA_SUMS_32(d, i) MOEKIT_WGMMA_SUMS_16(d, i), MOEKIT_WGMMA_SUMS_16(d, (i) + 16)
#define MOEKIT_WGMMA_SUMS_64(d, i) MOEKIT_WGMMA_SUMS_32(d, i), MOEKIT_WGMMA_SUMS_32(d, (i) + 32)
// clang-format on
